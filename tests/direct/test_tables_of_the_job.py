"""The kill tables for what is not an operation: the start of a job, a replacement that comes in, a planned end."""

from __future__ import annotations

from multiprocessing.connection import wait
from typing import Any

import kill_table as table
import numpy as np
import pytest
from harness import DEADLINE, Context, Group, Ranks
from kill_table import Comm, cells

import ftcomm

pytestmark = pytest.mark.table


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("point", "transport"), cells(*table.START))
@pytest.mark.parametrize("role", ["first", "last"])
def test_kill_at_the_start(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    """Everybody gets an error, or starts and then goes on without the victim."""
    victim = 0 if role == "first" else size - 1

    def run(group: Group, context: Context) -> Any:
        try:
            comm = ftcomm.init(context.rank, size, store=group.store(), job=group.job, options=group.options, timeout=3)
        except ftcomm.Error:
            return "no start"
        return table.survive(comm, 2)

    faults = f"rank={victim},at={point},do=kill"
    group = ranks.start(size, run, direct=False, faults=faults, heartbeat=table.HEARTBEAT, transport=transport)
    results = group.results(120)
    others = [r for r in results if r.rank != victim]
    assert all(r.ok for r in others), table.text_of(results)
    # A link is made only when it is needed: a handshake may come at the start of some and in the operations of others.
    if not point.startswith("handshake."):
        assert len({str(r.value) for r in others}) == 1, table.text_of(results)
    table.record(point, transport, results[victim].status == -9)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("point", "transport"), cells(*table.JOIN))
@pytest.mark.parametrize("role", ["leader", "member", "joiner"])
def test_kill_in_a_join(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    """Slot 1 is refilled; somebody dies in that; the others go on with the same bits."""
    lost = 1
    victim = {"leader": "0", "member": str(size - 1), "joiner": f"{lost}.1"}[role]
    if size == 2 and role != "joiner":
        pytest.skip("two ranks: nobody would be left who could let it in")

    def run(comm: Comm, context: Context) -> Any:
        if context.incarnation:
            context.mark("waiting")
            comm.job.join_wait().wait()
        else:
            if comm.rank == lost:
                context.die()
            while lost in comm.all_reduce(np.ones(100)).contributors:
                pass
            context.mark("without")
            comes = context.hold()
            comm.ack_failed()
            while comes:
                here = lost in comm.job.waiting()
                try:
                    everybody = comm.agree(int(here)) & 1
                except ftcomm.PeerFailure as error:
                    everybody = (error.value or 0) & 1
                    comm.ack_failed()
                if everybody:
                    comm.job.admit().wait()
                    break
        return table.lossy_rounds(comm, 10, 14)

    faults = f"rank={victim},at={point},do=kill"
    group = ranks.start(size, run, policy="lossy", transport=transport, heartbeat=table.HEARTBEAT, faults=faults)
    for rank in range(size):
        if rank != lost:
            group.wait_for(rank, "without")
    group.spawn(lost, run, incarnation=1)
    group.wait_for(lost, "waiting")
    comes = (role, point) != ("joiner", "join.request")  # else it dies before anybody hears of it
    if not comes:
        assert wait([group._processes[lost, 1].pidfd], DEADLINE)
    for rank in range(size):
        if rank != lost:
            group.release(rank, comes)
    results = [r for r in group.results(120) if (r.rank, r.incarnation) != (lost, 0)]
    killed = {f"{r.rank}.{r.incarnation}" if r.incarnation else str(r.rank) for r in results if r.status == -9}
    alive = [r for r in results if r.status == 0]
    assert len(killed) + len(alive) == len(results), table.text_of(results)
    assert killed <= {victim}, table.text_of(results)
    assert len({str(r.value) for r in alive}) <= 1, table.text_of(results)
    table.record(point, transport, bool(killed))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("point", "transport"), cells(*table.LEAVE))
@pytest.mark.parametrize("policy", ["raise", "lossy"])
@pytest.mark.parametrize("role", ["first", "last"])
def test_kill_in_leaving(ranks: Ranks, transport: str, size: int, point: str, policy: str, role: str) -> None:
    """Nobody waits for its goodbye, and what was done before stays done."""
    victim = 0 if role == "first" else size - 1

    def run(comm: Comm) -> Any:
        return table.survive(comm, 2) if policy == "raise" else table.lossy_rounds(comm, 0, 2)

    faults = f"rank={victim},at={point},do=kill"
    group = ranks.start(size, run, faults=faults, heartbeat=table.HEARTBEAT, policy=policy, transport=transport)
    table.judge(group.results(120), {victim}, {victim}, point, transport)
