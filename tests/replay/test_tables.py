"""The kill table of replay (make tables): a kill of each role at each failpoint, for 2, 3, 4 and 8 ranks, over all transports.

Every cell ends with the bits of the undisturbed run on every rank. A few cells of each kind run with every `make test`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kill_table as table
import programs
import pytest
from keeper import Keeper, faults
from kill_table import LOGGED, cells

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls", "some_chains", "some_windows")

RUN = tuple(prefix for prefix in table.OPERATION if prefix != "p2p.")
RECOVERY = (*table.VIEW, "repair.", "join.request", "join.before", "join.after")
AGAIN = ("replay.", *LOGGED, "start.", "join.request", "join.after", "comm.create", "vote.", "decide.apply")


def judge(job: Keeper, wanted: list[Any], victims: set[int], point: str, transport: str, incarnation: int = 0) -> None:
    values = job.values(120)
    assert values == wanted, f"{point} over {transport}, deaths {job.deaths}, generation {job.generation}"
    table.record(point, transport, any((victim, incarnation) in job.deaths for victim in victims))


def in_an_operation(
    keep: Keep, undisturbed: Any, size: int, victims: set[int], point: str, transport: str, **options: Any
) -> None:
    wanted = undisturbed(size, programs.everything, transport)
    job = keep(size, programs.everything, transport=transport, faults=faults(victims, point), heartbeat=2.0, **options)
    judge(job, wanted, victims, point, transport)


# -- with every run of the tests


@pytest.mark.parametrize(("point", "transport"), [cell for cell in cells(*LOGGED) if cell[1] == "shm"])
@pytest.mark.sample(6)
def test_kill_at_the_log(keep: Keep, undisturbed: Any, point: str, transport: str) -> None:
    in_an_operation(keep, undisturbed, 3, {1}, f"{point}:3", transport)


@pytest.mark.parametrize("point", ["channel.piece", "channel.arrived", "result.before", "fence.after", "direct.send"])
@pytest.mark.sample(2)
def test_kill_over_tcp(keep: Keep, undisturbed: Any, point: str) -> None:
    in_an_operation(keep, undisturbed, 3, {1}, f"{point}:2", "tcp")


@pytest.mark.parametrize("point", ["replay.serve:5", "replay.live", "vote.send"])
@pytest.mark.sample(1)
def test_the_same_rank_twice(keep: Keep, undisturbed: Any, point: str) -> None:
    wanted = undisturbed(3, programs.everything, "shm")
    spec = f"{faults({1}, 'flat.reduce:7')};{faults({1}, point, incarnation=1)}"
    job = keep(3, programs.everything, transport="shm", faults=spec, heartbeat=2.0)
    assert job.values() == wanted
    assert (1, 0) in job.deaths
    assert (1, 1) in job.deaths


@pytest.mark.parametrize(
    "point", ["view.before", "join.before", "vote.plan", "decide.before", "repair.start", "replay.serve"]
)
@pytest.mark.sample(2)
def test_a_second_rank_in_the_recovery(keep: Keep, undisturbed: Any, point: str) -> None:
    """Rank 2 dies, and rank 0, which leads, in what follows; or rank 2's replacement when rank 1 dies during its replay."""
    wanted = undisturbed(3, programs.everything, "shm")
    second = (
        f"rank=1,at=decide.apply:1,do=kill;rank=2.1,at={point}:3,do=stop:0.2"
        if point == "replay.serve"
        else faults({0}, point)
    )
    job = keep(
        3, programs.everything, transport="shm", faults=f"{faults({2}, 'pull.reduce:3')};{second}", heartbeat=2.0
    )
    assert job.values() == wanted
    sure = {"replay.serve": {1, 2}, "view.before": {2}}  # rank 1 may be the first to write the view
    assert {rank for rank, _ in job.deaths} >= sure.get(point, {0, 2})


# -- the whole table


def roles(size: int) -> list[set[int]]:
    """First, second, last, a pair of neighbours, all."""
    found = [{0}, {1}, {size - 1}, {0, 1}, set(range(size))]
    return [victims for i, victims in enumerate(found) if victims not in found[:i]]


SIZES_AND_VICTIMS = [(size, victims) for size in (2, 3, 4, 8) for victims in roles(size)]


@pytest.mark.table
@pytest.mark.parametrize(("size", "victims"), SIZES_AND_VICTIMS)
@pytest.mark.parametrize(("point", "transport"), cells(*LOGGED, *RUN))
def test_kill_in_an_operation(
    keep: Keep, undisturbed: Any, transport: str, size: int, point: str, victims: set[int]
) -> None:
    in_an_operation(keep, undisturbed, size, victims, f"{point}:2", transport)


@pytest.mark.table
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("point", "transport"), cells(*RECOVERY))
@pytest.mark.parametrize("role", ["leader", "second", "all others"])
def test_kill_in_a_recovery(keep: Keep, undisturbed: Any, transport: str, size: int, point: str, role: str) -> None:
    """The last rank dies first."""
    victims = {"leader": {0}, "second": {1 % (size - 1)}, "all others": set(range(size - 1))}[role]
    wanted = undisturbed(size, programs.everything, transport)
    spec = f"{faults({size - 1}, 'result.before:9')};{faults(victims, point)};{faults(victims, point, 1)}"
    job = keep(size, programs.everything, transport=transport, faults=spec, heartbeat=2.0)
    judge(job, wanted, victims, point, transport)


@pytest.mark.table
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("point", "transport"), cells(*AGAIN))
@pytest.mark.parametrize("nth", [1, 4])
def test_kill_of_a_replacement(keep: Keep, undisturbed: Any, transport: str, size: int, point: str, nth: int) -> None:
    """Twice, and its replacement's replacement comes through."""
    wanted = undisturbed(size, programs.everything, transport)
    spec = ";".join([faults({1}, "fence.before:9"), faults({1}, f"{point}:{nth}", 1), faults({1}, f"{point}:{nth}", 2)])
    job = keep(size, programs.everything, transport=transport, faults=spec, heartbeat=2.0)
    judge(job, wanted, {1}, point, transport, incarnation=1)


@pytest.mark.table
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("point", "transport"), cells("log.spill."))
def test_kill_while_spilling(
    keep: Keep, undisturbed: Any, tmp_path: Any, transport: str, size: int, point: str
) -> None:
    in_an_operation(
        keep,
        undisturbed,
        size,
        {1},
        point,
        transport,
        log_limit=(8 + 2 * size) << 20,
        log_spill=str(tmp_path / "spill"),
    )
