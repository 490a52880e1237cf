"""The kill tables (make tables): a kill of each role at each failpoint, for several world sizes, over both transports.

Every cell runs the same workload, which passes through the failpoint; the victim is killed there. The survivors repair or shrink,
go on, and end with the same bits; nobody hangs. A cell whose workload never takes the victim through the point is skipped, and
the table says so: some roles do not exist (only a leader records a decision).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks

import ftcomm
from ftcomm._lib import lib

Comm = ftcomm.Communicator
START = ("rendezvous.", "start.", "handshake.", "comm.create")
JOIN = ("join.",)
ELSEWHERE = ("join.transfer.", "step", "leave.send")  # torch's join point; a training step; a planned end
AFTER_A_DEATH = ("vote.", "decide.", "repair.", "agree.", "shrink.", "view.")
LARGE, SMALL = 60_000, 16


def points(*prefixes: str, but: tuple[str, ...] = ()) -> list[str]:
    ffi, C = lib()
    names = [point["name"] for point in json.loads(ffi.string(C.ft_fault_points()).decode())]
    return [n for n in names if (not prefixes or n.startswith(prefixes)) and not (but and n.startswith(but))]


def digest(*arrays: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def work(comm: Comm, round: int) -> str:
    """One of everything; the digest covers what must be the same on all ranks."""
    rng = np.random.default_rng(1000 * round + comm.slots[comm.rank])
    large, small = rng.standard_normal(LARGE), rng.standard_normal(SMALL)
    comm.all_reduce(large, algorithm="ring")
    comm.all_reduce(small, "avg", algorithm="flat")
    told = np.full(1000, comm.rank, np.int32)
    comm.broadcast(told, round % comm.size)
    gathered = np.zeros(comm.size)
    comm.all_gather(gathered, np.array([float(comm.slots[comm.rank])]))
    if comm.size > 1:
        swapped = np.zeros(comm.size * 100)
        comm.all_to_all(swapped, np.full(comm.size * 100, comm.rank + 0.5))
        eager, big = np.zeros(4), np.zeros(50_000)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for buf in (eager, big):
            sending = comm.isend(np.full_like(buf, comm.rank), after)
            comm.recv(buf, before)
            sending.wait()
            assert (buf == before).all()
    comm.barrier()
    return digest(large, small, told, gathered)


def survive(comm: Comm, rounds: int) -> tuple[list[tuple[int, str]], Comm]:
    """Works, shrinks whenever somebody is gone, and works again; returns (round, digest) of what succeeded at the end."""
    done: list[tuple[int, str]] = []
    round = 0
    while round < rounds:
        try:
            value, ok = work(comm, round), 1
        except (ftcomm.PeerFailure, ftcomm.Revoked):
            if not comm.revoked:
                comm.revoke()
            value, ok = "", 0
        comm.ack_failed()
        try:
            all_ok = comm.agree(ok)
        except ftcomm.PeerFailure as error:
            assert error.value is not None
            all_ok = error.value
        if all_ok & 1:
            done.append((round, value))
            round += 1
        else:
            comm = comm.shrink()
    return done, comm


def run_cell(
    ranks: Ranks, size: int, victim: int, point: str, *, first_dies: int | None = None, **options: Any
) -> None:
    """``first_dies``: another rank is killed before, so that the victim dies in the recovery from that."""

    def run(comm: Comm, context: Context) -> Any:
        if comm.rank == first_dies:
            work(comm, 99)
            context.die()
        if first_dies is not None:
            try:
                work(comm, 99)
            except ftcomm.PeerFailure:
                comm = comm.shrink()
        done, comm = survive(comm, 4)
        return done, comm.slots

    group = ranks.start(size, run, faults=f"rank={victim},at={point},do=kill", heartbeat=0.5, **options)
    results = group.results(120)
    judge(results, victim, first_dies, point)


def judge(results: list[Any], victim: int, first_dies: int | None, point: str) -> None:
    texts = "\n".join(result.text() for result in results)
    dead = [r for r in results if r.status == -9]
    alive = [r for r in results if r.status != -9]
    assert {r.rank for r in dead} <= {victim, first_dies}, texts
    assert all(r.ok for r in alive), texts
    if alive:
        assert len({str(r.value) for r in alive}) == 1, f"survivors differ\n{texts}"
    if victim not in {r.rank for r in dead}:
        pytest.skip(f"rank {victim} never passes {point} here")


@pytest.mark.table
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("point", points(but=(*START, *JOIN, *ELSEWHERE, *AFTER_A_DEATH)))
@pytest.mark.parametrize("role", ["first", "second", "last"])
def test_kill_in_an_operation(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    run_cell(ranks, size, {"first": 0, "second": 1, "last": size - 1}[role], point, transport=transport)


@pytest.mark.table
@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("point", points(*AFTER_A_DEATH))
@pytest.mark.parametrize("role", ["leader", "member"])
def test_kill_in_a_recovery(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    run_cell(ranks, size, 0 if role == "leader" else 1, point, first_dies=size - 1, transport=transport)


@pytest.mark.table
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("point", points(*START))
@pytest.mark.parametrize("role", ["first", "last"])
def test_kill_at_the_start(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    """Everybody gets an error, or starts and then goes on without the victim."""
    victim = 0 if role == "first" else size - 1

    def run(group: Group, context: Context) -> Any:
        try:
            comm = ftcomm.init(context.rank, size, store=group.store(), job=group.job, options=group.options, timeout=5)
        except ftcomm.Error:
            return "no start"
        survive(comm, 2)
        return "went on"

    faults = f"rank={victim},at={point},do=kill"
    results = ranks.start(size, run, direct=False, faults=faults, heartbeat=0.5, transport=transport).results(120)
    texts = "\n".join(result.text() for result in results)
    assert all(r.ok for r in results if r.rank != victim), texts
    assert point.startswith("handshake.") or len({r.value for r in results if r.rank != victim}) <= 1, texts
    if results[victim].status != -9:
        pytest.skip(f"rank {victim} never passes {point} here")


def lossy_rounds(comm: Comm, first: int, last: int) -> list[str]:
    seen = []
    for round in range(first, last):
        buf = np.random.default_rng(100 * round + comm.rank).standard_normal(LARGE)
        outcome = comm.all_reduce(buf, "avg")
        seen.append(f"{round} {outcome.contributors} {digest(buf)}")
    return seen


@pytest.mark.table
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("point", points("ring.", "fence.", "vote.", "decide.", "repair.", "view."))
@pytest.mark.parametrize("role", ["first", "last"])
def test_kill_under_lossy(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    """The very all-reduce is finished; all survivors have the same bits and the same contributors."""
    victim = 0 if role == "first" else size - 1
    second = size - 1 - victim if point.startswith(("vote.", "decide.", "repair.", "view.")) and size > 2 else None

    def run(comm: Comm, context: Context) -> Any:
        if comm.rank == second:
            lossy_rounds(comm, 0, 1)
            context.die()
        return lossy_rounds(comm, 0, 6)

    faults = f"rank={victim},at={point},do=kill"
    group = ranks.start(size, run, faults=faults, heartbeat=0.5, policy="lossy", transport=transport)
    judge(group.results(120), victim, second, point)


@pytest.mark.table
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("point", points(*JOIN, but=ELSEWHERE))
@pytest.mark.parametrize("role", ["leader", "member", "joiner"])
def test_kill_in_a_join(ranks: Ranks, transport: str, size: int, point: str, role: str) -> None:
    """Slot 1 is refilled; somebody dies in that; the others go on with the same bits."""
    lost = 1
    victim = {"leader": "0", "member": str(size - 1), "joiner": f"{lost}.1"}[role]
    if role == "member" and size == 2:
        pytest.skip("two ranks: no other member")

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
            context.hold()
            comm.ack_failed()
            for _ in range(200):
                here = lost in comm.job.waiting()
                try:
                    everybody = comm.agree(int(here)) & 1
                except ftcomm.PeerFailure as error:
                    everybody = (error.value or 0) & 1
                    comm.ack_failed()
                if everybody:
                    comm.job.admit().wait()
                    break
        return lossy_rounds(comm, 10, 14)

    faults = f"rank={victim},at={point},do=kill"
    group = ranks.start(size, run, policy="lossy", transport=transport, heartbeat=0.5, faults=faults)
    for rank in range(size):
        if rank != lost:
            group.wait_for(rank, "without")
    group.spawn(lost, run, incarnation=1)
    group.wait_for(lost, "waiting")
    for rank in range(size):
        if rank != lost:
            group.release(rank)
    results = [r for r in group.results(120) if (r.rank, r.incarnation) != (lost, 0)]
    texts = "\n".join(result.text() for result in results)
    killed = [r for r in results if r.status == -9]
    alive = [r for r in results if r.status == 0]
    assert len(killed) + len(alive) == len(results), texts
    assert len({str(r.value) for r in alive}) <= 1, texts
    if not killed:
        pytest.skip(f"{victim} never passes {point} here")
