"""Policy replay on several hosts: all ranks of a host die; its replacements share memory again, so that sums keep their order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import kill_table as table
import programs
import pytest
from harness import Context
from keeper import Keeper, faults
from kill_table import LOGGED, points
from tables import most

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls", "some_chains")

RUN = tuple(prefix for prefix in table.OPERATION if prefix not in ("p2p.", "pull.", "stage."))


def with_links(comm: Any, context: Context) -> tuple[list[str], list[str]]:
    """And by which wire the ranks are reached in the end."""
    history = programs.everything(comm, context)
    return history, comm.stats()["links"]


def ends_as_undisturbed(keep: Keep, undisturbed: Any, size: int, spec: str) -> Keeper:
    wanted = undisturbed(size, programs.everything, "hosts")
    job = keep(size, programs.everything, transport="hosts", faults=spec, heartbeat=2.0)
    assert job.values(120) == wanted, f"deaths {job.deaths}, generation {job.generation}"
    return job


def shares_memory_again(keep: Keep, undisturbed: Any, spec: str, on_a_host: int = 2, **options: Any) -> Keeper:
    transport = "hosts" if on_a_host == 2 else "hosts of 3"
    size = 2 * on_a_host
    wanted = undisturbed(size, programs.everything, transport)
    job = keep(size, with_links, transport=transport, faults=spec, **{"heartbeat": 2.0, **options})
    values = job.values(120)
    assert [history for history, _ in values] == wanted
    assert {rank for rank, _ in job.deaths} >= {0, 1}
    assert [links for _, links in values] == [
        ["self" if i == k else "shm" if i // on_a_host == k // on_a_host else "tcp" for i in range(size)]
        for k in range(size)
    ]
    return job


@pytest.mark.parametrize("point", most(["group.sum:2", "channel.send.logged:4"], ["group.ready:3", "fence.after:5"]))
def test_a_host_dies(keep: Keep, undisturbed: Any, point: str) -> None:
    shares_memory_again(keep, undisturbed, faults({0, 1}, point))


@pytest.mark.parametrize(
    ("point", "victims"),
    most(
        [("join.make", {0}), ("join.mapped", {1, 2}), ("join.request", {0, 1, 2}), ("join.make", {0, 1, 2})],
        product(["join.make", "join.mapped", "join.request"], [{0}, {1, 2}, {0, 1, 2}]),
    ),
)
@pytest.mark.sample(2)
def test_replacements_of_a_host_die(keep: Keep, undisturbed: Any, point: str, victims: set[int]) -> None:
    """Who makes the segment, who has just got it, who has it: the others find its place free, or the segment where it was."""
    spec = f"{faults({0, 1, 2}, 'group.sum:2')};{faults(victims, point, 1)}"
    shares_memory_again(keep, undisturbed, spec, on_a_host=3)


def test_a_stopped_rank_does_not_keep_the_memory_from_others(keep: Keep, undisturbed: Any) -> None:
    """Rank 2 gives it."""
    spec = "rank=1.0,at=group.sum:2,do=kill;rank=0.0,at=group.sum:2,do=stop:3"
    shares_memory_again(keep, undisturbed, spec, on_a_host=3, heartbeat=0.5)


def test_memory_of_a_stopped_rank_is_not_made_again_while_it_lives(keep: Keep, undisturbed: Any) -> None:
    """Rank 1's replacement waits for rank 0, which is stopped and voted out, until that has noticed and let go."""
    spec = "rank=1.0,at=group.sum:2,do=kill;rank=0.0,at=group.sum:2,do=stop:3"
    shares_memory_again(keep, undisturbed, spec, heartbeat=0.5)


# -- the whole table


@pytest.mark.table
@pytest.mark.parametrize(
    ("size", "victims"),
    [(4, {0, 1}), (4, {2, 3}), (4, {0, 1, 2}), (4, {0, 1, 2, 3}), (8, {0, 1}), (8, {2, 3, 4, 5}), (8, set(range(8)))],
)
@pytest.mark.parametrize("point", [p for p in points(*LOGGED, *RUN) if not p.startswith((*table.LATER, "shm."))])
def test_kill_in_an_operation(keep: Keep, undisturbed: Any, point: str, size: int, victims: set[int]) -> None:
    job = ends_as_undisturbed(keep, undisturbed, size, faults(victims, f"{point}:2"))
    table.record(point, "hosts", any((victim, 0) in job.deaths for victim in victims))


@pytest.mark.table
@pytest.mark.parametrize("victims", [{0, 1}, {2, 3}, {0, 1, 2}])
@pytest.mark.parametrize(
    "point", points(*table.VIEW, "repair.", "join.request", "join.make", "join.mapped", "join.before", "join.after")
)
def test_kill_in_a_recovery(keep: Keep, undisturbed: Any, point: str, victims: set[int]) -> None:
    """Rank 3 dies first; with {2, 3} its replacement dies as well."""
    spec = f"{faults({3}, 'result.before:9')};{faults(victims - {3}, point)};{faults(victims, point, 1)}"
    job = ends_as_undisturbed(keep, undisturbed, 4, spec)
    table.record(point, "hosts", any((victim, n) in job.deaths for victim in victims for n in (0, 1)))
