"""The kill tables (make tables): a kill of each role at each failpoint, for several world sizes, over both transports.

Every cell runs the same workload, which passes through the failpoint; the victim is killed there. The survivors repair or shrink,
go on, and end with the same bits, those of the reference; nobody hangs and nothing is left behind.
"""

from __future__ import annotations

from typing import Any

import kill_table as table
import pytest
from harness import Context, Ranks
from kill_table import Comm, cells

pytestmark = [pytest.mark.table, pytest.mark.usefixtures("pulls", "some_chains", "some_windows")]


def roles(size: int) -> list[int]:
    """First, second, last: the lowest leads, the second takes over from it."""
    return sorted({0, 1, size - 1})


def faults(victims: set[int], point: str) -> str:
    return ";".join(f"rank={victim},at={point},do=kill" for victim in sorted(victims))


def run_cell(
    ranks: Ranks, size: int, victims: set[int], point: str, transport: str, first_dies: int | None = None
) -> None:
    """``first_dies``: another rank is killed before, so that the victims die in the recovery from that."""

    def run(comm: Comm, context: Context) -> Any:
        if comm.rank == first_dies:
            table.work(comm, 0)
            context.die()
        return table.survive(comm, 4)

    group = ranks.start(size, run, faults=faults(victims, point), heartbeat=table.HEARTBEAT, transport=transport)
    may_die = victims if first_dies is None else {*victims, first_dies}
    results = group.results(120)
    for result in results:
        if result.ok:
            done, team = result.value
            assert [round for round, _ in done] == [0, 1, 2, 3], table.text_of(results)
            # A victim may get to its failpoint when all is done, in its leave: then it was in the last team.
            alive = {r.rank for r in results if r.status == 0}
            assert alive <= set(team) <= alive | victims, table.text_of(results)
    table.judge(results, may_die, victims, point, transport)


@pytest.mark.parametrize(("size", "victim"), [(size, victim) for size in (2, 3, 4, 8) for victim in roles(size)])
@pytest.mark.parametrize(
    ("point", "transport"), [*cells(*table.OPERATION), ("comm.create:2", "shm"), ("comm.create:2", "tcp")]
)
def test_kill_in_an_operation(ranks: Ranks, transport: str, size: int, point: str, victim: int) -> None:
    run_cell(ranks, size, {victim}, point, transport)


@pytest.mark.parametrize("nth", [2, 5])
@pytest.mark.parametrize(("point", "transport"), cells(*table.OPERATION, "agree."))
def test_kill_at_a_later_pass(ranks: Ranks, transport: str, point: str, nth: int) -> None:
    """In the middle of a loop over peers, segments or rounds."""
    run_cell(ranks, 4, {1}, f"{point}:{nth}", transport)


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize(("point", "transport"), cells(*table.AFTER_A_DEATH))
@pytest.mark.parametrize("role", ["leader", "member", "all but one"])
def test_kill_in_a_recovery(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    """The last rank dies first. "All but one": whoever gets there dies, until one is left."""
    victims = {"leader": {0}, "member": {1}, "all but one": set(range(size - 2))}[role]
    run_cell(ranks, size, victims, point, transport, first_dies=size - 1)


CARRIED = ("collective.", "ring.", "pull.", "stage.", "group.")
LOSSY = (*table.VIEW, *table.REPAIR, *CARRIED, "fence.", "flat.", "tcp.", "shm.")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("point", "transport"), cells(*LOSSY))
@pytest.mark.parametrize("role", ["first", "last", "all but one"])
def test_kill_under_lossy(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    """The very all-reduce is finished; all survivors have the same bits and the same contributors."""
    if role == "all but one":
        if size == 2:
            pytest.skip("with two ranks that is the first")
        victims = set(range(size - 1))
    else:
        victims = {0 if role == "first" else size - 1}
    first_dies = None
    if point.startswith((*table.VIEW, *table.REPAIR)) and size > 2:
        first_dies = size - 2 if role == "all but one" else size - 1 - min(victims)
        victims -= {first_dies}

    def run(comm: Comm, context: Context) -> Any:
        if comm.rank == first_dies:
            table.lossy_rounds(comm, 0, 1)
            context.die()
        return table.lossy_rounds(comm, 0, 6)

    group = ranks.start(
        size, run, faults=faults(victims, point), heartbeat=table.HEARTBEAT, policy="lossy", transport=transport
    )
    may_die = victims if first_dies is None else {*victims, first_dies}
    table.judge(group.results(120), may_die, victims, point, transport)


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize(("point", "transport"), cells(*CARRIED, "fence.", "flat.done"))
def test_kill_in_the_last_operation(ranks: Ranks, transport: str, point: str, victim: int) -> None:
    """Nothing comes after it that could set anything right. Whether the dead rank counts depends on how far its data had come
    (all of it may have, when only its fence is missing); all survivors must say the same of it, and have the bits that follow."""
    nth = {"ring.rs.hop": 4, "ring.ag.hop": 6}.get(point, 1)  # the last one, with eight segments on four ranks

    def run(comm: Comm, context: Context) -> Any:
        return table.lossy_rounds(comm, 5, 6)

    fault = faults({victim}, f"{point}:{nth}")
    group = ranks.start(4, run, faults=fault, heartbeat=table.HEARTBEAT, policy="lossy", transport=transport)
    table.judge(group.results(120), {victim}, {victim}, point, transport)
