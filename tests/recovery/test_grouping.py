"""The planner of selective logging: its limits, its distance from the optimum, its work, its words."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tables import most

import ftcomm
from ftcomm.recovery import exhaustive, from_stages, plan_groups

GIVEN: dict[str, Any] = {"log_limit": 1000, "bandwidth": 10.0, "checkpoint_interval": 10}


def instances(number: int, seed: int, most: int = 9) -> Iterator[tuple[list[float], list[int], dict[str, Any]]]:
    """Random problems of every kind: equal and zero sizes, limits from nothing to more than everything, parallel recovery."""
    random_ = random.Random(seed)
    for _ in range(number):
        machines = random_.randint(1, most)
        seconds = [random_.choice((0.0, 1.0, 10 ** random_.uniform(-2, 2))) for _ in range(machines)]
        sizes = [random_.choice((0, 7, random_.randint(1, 1000))) for _ in range(machines - 1)]
        interval = random_.randint(1, 50)
        limit = int(random_.choice((0, random_.random(), random_.random(), 1.2)) * sum(sizes) * interval)
        given: dict[str, Any] = {
            "log_limit": limit,
            "bandwidth": 10 ** random_.uniform(0, 4),
            "checkpoint_interval": interval,
        }
        given["degree"] = random_.choice((1, 2, None))
        given["micro_batches"] = random_.choice((None, 1, 3, 8))
        yield seconds, sizes, given


def replay(groups: list[list[int]], seconds: list[float], sizes: list[int], given: dict[str, Any]) -> float:
    """SWIFT 5.3 written down once more, for any groups, consecutive or not."""
    machines, total = len(seconds), 0.0
    for group in groups:
        inside = sum(sizes[m] for m in group if m + 1 in group)
        degree = machines // len(group)
        if given["degree"] is not None:
            degree = min(degree, given["degree"])
        batches = given["micro_batches"]
        speedup = float(degree)
        if batches is not None:
            speedup = batches / math.ceil(batches / min(degree, batches))
        total += len(group) * (sum(seconds[m] for m in group) + inside / given["bandwidth"]) / speedup
    return total / machines


def logged(groups: list[list[int]], sizes: list[int], given: dict[str, Any]) -> int:
    group_of = {m: i for i, group in enumerate(groups) for m in group}
    between = (size for m, size in enumerate(sizes) if group_of[m] != group_of[m + 1])
    return int(sum(between) * given["checkpoint_interval"])


def partitions(machines: int) -> Iterator[list[list[int]]]:
    if machines == 0:
        yield []
        return
    for smaller in partitions(machines - 1):
        for i in range(len(smaller)):
            yield [*smaller[:i], [*smaller[i], machines - 1], *smaller[i + 1 :]]
        yield [*smaller, [machines - 1]]


@pytest.mark.parametrize("improve", [True, False])
def test_limit_figures_and_optimum_over_random_instances(improve: bool) -> None:
    optimal = 0
    for seconds, sizes, given in instances(600, seed=1):
        found = plan_groups(seconds, sizes, **given, improve=improve)
        groups = [list(group) for group in found.groups]
        assert list(itertools.chain(*groups)) == list(range(len(seconds)))
        assert all(groups)
        assert found.log_bytes <= given["log_limit"]
        assert found.log_bytes == logged(groups, sizes, given)
        assert found.replay_seconds == pytest.approx(replay(groups, seconds, sizes, given), abs=1e-9)
        assert found.recovery_seconds == pytest.approx(found.replay_seconds * given["checkpoint_interval"] / 2)
        best = exhaustive(seconds, sizes, **given)
        assert best.log_bytes <= given["log_limit"]
        assert best.replay_seconds <= found.replay_seconds * (1 + 1e-9) + 1e-9
        optimal += found.replay_seconds <= best.replay_seconds * (1 + 1e-9) + 1e-9
    assert optimal >= (540 if improve else 460), optimal


def test_improving_is_never_worse() -> None:
    better = 0
    for seconds, sizes, given in instances(600, seed=2):
        plain = plan_groups(seconds, sizes, **given, improve=False).replay_seconds
        improved = plan_groups(seconds, sizes, **given).replay_seconds
        assert improved <= plain
        better += improved < plain * (1 - 1e-9)
    assert better >= 30, better


def test_merging_is_monotone_in_the_limit() -> None:
    for seconds, sizes, given in instances(150, seed=3):
        everything = sum(sizes) * given["checkpoint_interval"]
        limits = [everything * i // 20 for i in range(21)]
        found = [plan_groups(seconds, sizes, **{**given, "log_limit": limit}, improve=False) for limit in limits]
        for less, more in itertools.pairwise(found):
            assert more.replay_seconds <= less.replay_seconds * (1 + 1e-9) + 1e-9
            starts = [{group[0] for group in grouping.groups} for grouping in (less, more)]
            assert starts[0] <= starts[1]


def test_the_optimum_is_monotone_and_improving_may_not_be() -> None:
    """Found at random; docs/planning.md says so."""
    seconds = [11.99 + 0.48, 72.66, 58.75, 11.99, 89.84]
    given = {"bandwidth": 1e9, "checkpoint_interval": 1, "degree": None}
    found = [plan_groups(seconds, [2, 10, 9, 11], log_limit=limit, **given).replay_seconds for limit in (9, 10)]
    best = [exhaustive(seconds, [2, 10, 9, 11], log_limit=limit, **given).replay_seconds for limit in (9, 10)]
    assert found[0] < found[1] < found[0] * 1.1
    assert best[0] >= best[1]


def test_groups_that_are_not_consecutive_are_no_better() -> None:
    for seconds, sizes, given in instances(60, seed=4, most=6):
        fitting = (g for g in partitions(len(seconds)) if logged(g, sizes, given) <= given["log_limit"])
        best = min(replay(groups, seconds, sizes, given) for groups in fitting)
        assert exhaustive(seconds, sizes, **given).replay_seconds == pytest.approx(best, abs=1e-9)


def test_by_hand() -> None:
    """Merging 0 and 1 adds ((1+1+10)*2-1-1)/3 for 100 bytes, 1 and 2 ((1+5+20)*2-1-5)/3 for 200: 22/100 against 46/200."""
    found = plan_groups(
        [1.0, 1.0, 5.0], [100, 200], log_limit=2999, bandwidth=10.0, checkpoint_interval=10, improve=False
    )
    assert found.groups == ((0, 1), (2,))
    assert found.replay_seconds == pytest.approx((2 * 12 + 5) / 3)
    assert found.recovery_seconds == pytest.approx((2 * 12 + 5) / 3 * 5)
    assert found.log_bytes == 2000
    # One more in the pipeline, and the price of 1 and 2 falls under that of 0 and 1.
    found = plan_groups(
        [1.0, 1.0, 4.0], [100, 220], log_limit=3199, bandwidth=1e9, checkpoint_interval=10, improve=False
    )
    assert found.groups == ((0, 1), (2,))
    found = plan_groups(
        [1.0, 1.0, 0.5], [100, 220], log_limit=3199, bandwidth=1e9, checkpoint_interval=10, improve=False
    )
    assert found.groups == ((0,), (1, 2))


def test_parallel_recovery_divides_the_replay() -> None:
    given = {**GIVEN, "log_limit": math.inf}
    seconds, sizes = [2.0] * 6, [0] * 5
    assert plan_groups(seconds, sizes, **given).replay_seconds == pytest.approx(2.0)
    assert plan_groups(seconds, sizes, **given, degree=None).replay_seconds == pytest.approx(2.0 / 6)
    assert plan_groups(seconds, sizes, **given, degree=3).replay_seconds == pytest.approx(2.0 / 3)
    shared = plan_groups(seconds, sizes, **given, degree=None, micro_batches=8)  # 8 over 6: someone has two
    assert shared.replay_seconds == pytest.approx(2.0 / 4)
    assert shared.degrees == (6,) * 6
    assert plan_groups(seconds, sizes, **given, degree=None, micro_batches=2).degrees == (2,) * 6
    together = plan_groups(seconds, [7] * 5, **{**given, "log_limit": 0}, degree=None)
    assert together.degrees == (1,)


def test_what_is_logged() -> None:
    found = plan_groups([1.0] * 4, [100, 1, 100], **{**GIVEN, "log_limit": 10})
    assert found.groups == ((0, 1), (2, 3))
    assert [found.group_of(m) for m in range(4)] == [0, 0, 1, 1]
    assert found.logs(1, 2)
    assert found.logs(3, 0)
    assert not found.logs(1, 0)
    for machine in (4, -1, "1"):
        with pytest.raises(ftcomm.ConfigError, match="machines 0 to 3"):
            found.group_of(machine)  # type: ignore[arg-type]


def test_nothing_fits() -> None:
    for limit in (0, 9):
        found = plan_groups([1.0, 2.0, 3.0], [1, 1], **{**GIVEN, "log_limit": limit})
        assert found.groups == ((0, 1, 2),)
        assert found.log_bytes == 0
        assert "not even one boundary fits" in found.reason
        assert exhaustive([1.0, 2.0, 3.0], [1, 1], **{**GIVEN, "log_limit": limit}).groups == found.groups


def test_boundaries_without_messages_stay() -> None:
    """Merging there would save nothing, so with no storage at all they still separate."""
    found = plan_groups([1.0, 1.0, 1.0], [5, 0], **{**GIVEN, "log_limit": 0}, improve=False)
    assert found.groups == ((0, 1), (2,))
    assert found.log_bytes == 0


def test_reasons() -> None:
    assert "One machine" in plan_groups([1.0], [], **GIVEN).reason
    assert "fit: 20 B of 1 kB" in plan_groups([1.0] * 3, [1, 1], **GIVEN).reason
    assert "more than 1 kB: 1 of 2 boundaries are not logged" in plan_groups([1.0] * 3, [60, 60], **GIVEN).reason
    assert "of 4." in exhaustive([1.0] * 3, [60, 60], **GIVEN).reason


def test_stages_to_machines() -> None:
    seconds, sizes = from_stages([1.0, 2.0, 3.0, 4.0], [10, 20, 30], [1, 2, 1], bandwidth=10.0)
    assert seconds == pytest.approx([1.0, 2.0 + 3.0 + 2.0, 4.0])
    assert sizes == [10, 30]
    assert from_stages([1.0, 2.0], [10], [2]) == ([3.0], [])
    for stages in ([1, 2], [1, 2, 2]):
        with pytest.raises(ftcomm.ConfigError, match="stages adds up to"):
            from_stages([1.0, 2.0, 3.0, 4.0], [10, 20, 30], stages)
    with pytest.raises(ftcomm.ConfigError, match=r"stages\[0\]"):
        from_stages([1.0], [], [0])


class Counted(float):
    """A number that counts what is done with it and with what comes out."""

    operations = 0


def _counted(name: str) -> Any:
    original = getattr(float, name)

    def operation(self: Counted, other: float) -> Any:
        Counted.operations += 1
        result = original(self, float(other))
        return Counted(result) if isinstance(result, float) else result

    return operation


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "lt", "le", "gt", "ge", "eq"):
    setattr(Counted, f"__{_name}__", _counted(f"__{_name}__"))
Counted.__hash__ = float.__hash__  # type: ignore[method-assign]


@pytest.mark.parametrize("improve", [True, False])
@pytest.mark.parametrize("share", most([0.02, 0.98], [0.0, 0.5]))
def test_quadratic_number_of_operations(improve: bool, share: float) -> None:
    """Every arithmetic operation and comparison on times and sizes is counted, twice as many machines four times as many."""
    counts = []
    for machines in (24, 48, 96):
        random_ = random.Random(machines)
        seconds = [Counted(random_.uniform(1, 10)) for _ in range(machines)]
        sizes = [Counted(random_.randint(1, 1000)) for _ in range(machines - 1)]
        Counted.operations = 0
        given = {**GIVEN, "log_limit": Counted(share * sum(map(float, sizes)) * 10)}
        plan_groups(seconds, sizes, **given, degree=None, improve=improve)
        counts.append(Counted.operations)
        assert Counted.operations <= (900 if improve else 12) * machines**2, counts
    assert counts[0] > 24
    assert counts[1] <= 4.4 * counts[0] + 200, counts
    assert counts[2] <= 4.4 * counts[1] + 200, counts


@pytest.mark.parametrize(
    ("seconds", "sizes", "changed", "says"),
    [
        ([], [], {}, "at least one machine"),
        ([1.0, 2.0], [], {}, "2 machines in a pipeline have 1 boundaries, but sizes has 0"),
        ([1.0], [5], {}, "1 machines in a pipeline have 0 boundaries"),
        ([1.0, -2.0], [5], {}, r"seconds\[1\]=-2.0 must be zero or a positive number of seconds"),
        ([1.0, math.nan], [5], {}, r"seconds\[1\]=nan"),
        ([1.0, "2"], [5], {}, r"seconds\[1\]='2'"),
        ([1.0, 2.0], [math.inf], {}, r"sizes\[0\]=inf must be zero or a positive number of bytes"),
        (3.0, [], {}, "seconds=3.0 must be a list of seconds"),
        ([1.0], None, {}, "sizes=None must be a list of bytes"),
        ([1.0], [], {"log_limit": -1}, r"log_limit=-1 must be .* of bytes \(or math.inf\)"),
        ([1.0], [], {"bandwidth": 0}, "bandwidth=0 must be a positive number of bytes per second"),
        (
            [1.0],
            [],
            {"checkpoint_interval": 0},
            "checkpoint_interval=0 must be a whole number of iterations, at least 1",
        ),
        ([1.0], [], {"checkpoint_interval": 1.5}, "whole number"),
        ([1.0], [], {"degree": 0}, "degree=0 must be a whole number"),
        ([1.0], [], {"micro_batches": True}, "micro_batches=True must be a whole number"),
        ([1.0], [], {"log_limit": 10**400}, "log_limit=1000.* must be zero or a positive number"),
    ],
)
@pytest.mark.parametrize("plan", [plan_groups, exhaustive])
def test_wrong_input(plan: Any, seconds: Any, sizes: Any, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ftcomm.ConfigError, match=says):
        plan(seconds, sizes, **{**GIVEN, **changed})


def test_numpys_numbers_are_numbers() -> None:
    """What was measured is often an array, of integers that would overflow or of floats with few digits."""
    given = {**GIVEN, "log_limit": 3e12, "checkpoint_interval": 500, "degree": None, "micro_batches": 8}
    plain = plan_groups([0.5, 1.5, 1.0], [2_000_000_000, 3_000_000_000], **given)
    for kind in (np.int32, np.int64):
        whole = {name: kind(given[name]) for name in ("checkpoint_interval", "micro_batches")}
        sizes = np.array([2_000_000_000, 3_000_000_000], np.uint32)
        assert plan_groups(np.array([0.5, 1.5, 1.0], np.float32), sizes, **{**given, **whole}) == plain


def test_too_many_to_try() -> None:
    exhaustive([1.0] * 10, [1] * 9, **GIVEN)
    with pytest.raises(ftcomm.ConfigError, match=r"11 machines have 1024 groupings.*Use plan_groups"):
        exhaustive([1.0] * 11, [1] * 10, **GIVEN)
