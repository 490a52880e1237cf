"""What the test programs of MPI's User-Level Failure Mitigation check (Bouteiller, Bosilca, Herault), on this library's calls.

Insulation, the revoked barrier, agree and the shrink without a failure are in test_failures.py and test_communicators.py.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks

import ftcomm

Comm = ftcomm.Communicator


def until_failure(comm: Comm) -> tuple[int, ...]:
    """Barriers until one fails; who is named."""
    with pytest.raises(ftcomm.PeerFailure) as caught:
        while True:
            comm.barrier()
    return caught.value.ranks


def die(comm: Comm, victim: int, context: Context) -> None:
    """When all are here: else the death may make what came before fail, for those who are not through."""
    word = np.zeros(1)
    if comm.rank != victim:
        comm.send(word, victim)
        return
    for rank in range(comm.size):
        if rank != victim:
            comm.recv(word, rank)
    context.die()


def test_barrier_of_the_living_half(ranks: Ranks, transport: str) -> None:
    """Halves that share nobody: one has a dead member and fails, on the other no barrier does."""

    def run(comm: Comm, context: Context) -> Any:
        half = comm.split(comm.rank % 2)
        assert half is not None
        die(comm, 2, context)
        if comm.rank % 2 == 0:
            seen: Any = until_failure(half)
        else:
            assert until_failure(comm) == (2,)  # so that the death is known here
            for _ in range(50):
                half.barrier()
            seen = "no error"
        comm.shrink().barrier()  # whoever leaves is gone for the others, too
        return seen

    values = ranks(6, run, dies={2}, transport=transport)
    assert [values[r] for r in (0, 4)] == [(1,)] * 2
    assert [values[r] for r in (1, 3, 5)] == ["no error"] * 3


def test_master_and_workers(ranks: Ranks, transport: str) -> None:
    """The master receives from anybody; two workers die with work in their hands, which is given out again."""

    def run(comm: Comm, context: Context) -> Any:
        if comm.rank > 0:
            got = np.zeros(1, np.int64)
            for done in range(1000):
                comm.send(np.array([comm.rank]), 0)  # give me work
                comm.recv(got, 0)
                if got[0] < 0:
                    return done
                if comm.rank in (1, 3):
                    context.die()
                comm.send(got, 0, tag=1)
        todo, given, results = list(range(40)), {}, set()
        idle: set[int] = set()
        heard: set[int] = set()
        working = set(range(1, comm.size))
        asked, answer = np.zeros(1, np.int64), np.zeros(1, np.int64)
        request = comm.irecv(asked)
        while working:
            try:
                request.wait()
            except ftcomm.PeerFailure:
                assert request.error is None  # it stays pending
                comm.ack_failed()
            else:
                worker = request.source
                request = comm.irecv(asked)
                if worker in given:
                    comm.recv(answer, worker, tag=1)
                    assert answer[0] == given.pop(worker)
                    results.add(int(answer[0]))
                idle.add(worker)
                heard.add(worker)
                if len(heard) < 4:  # everybody gets work, those that will die with it too
                    continue
            for dead in set(comm.failed()) & working:
                working.discard(dead)
                idle.discard(dead)
                if dead in given:
                    todo.append(given.pop(dead))
            for worker in tuple(idle):
                if todo:
                    given[worker] = todo.pop()
                    comm.send(np.array([given[worker]]), worker)
                elif not given:
                    comm.send(np.array([-1]), worker)
                    working.discard(worker)
                else:
                    continue
                idle.discard(worker)
        request.cancel()
        return sorted(results), comm.failed()  # workers that were sent home are gone, too

    values = ranks(5, run, dies={1, 3}, transport=transport)
    assert values[0][0] == list(range(40))
    assert {1, 3} <= set(values[0][1])


def test_failed_after_one_then_two(ranks: Ranks, transport: str) -> None:
    """The list only grows, and a communicator made in between starts empty."""

    def run(comm: Comm, context: Context) -> Any:
        assert comm.failed() == ()
        die(comm, 1, context)
        assert until_failure(comm) == (1,)
        assert comm.failed() == (1,)
        comm.ack_failed()
        smaller = comm.shrink()
        assert smaller.failed() == ()
        die(smaller, 2, context)
        assert until_failure(smaller) == (2,)
        with pytest.raises(ftcomm.PeerFailure) as caught:
            comm.agree()
        seen = caught.value.ranks, comm.failed(), smaller.failed()
        smaller.shrink().barrier()  # whoever leaves is gone for the others, too
        return seen

    values = ranks(4, run, dies={1, 3}, transport=transport)
    assert values[0] == values[2]
    assert values[0][1:] == ((1, 3), (2,))
    assert 3 in values[0][0]


def test_revoke_breaks_large_messages(ranks: Ranks, transport: str) -> None:
    """Sends and receives far larger than any buffer on the way, some matched, some not, all pending at the revoke."""

    def run(comm: Comm, context: Context) -> None:
        big, into = np.ones(4_000_000), np.zeros(4_000_000)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        requests = [comm.irecv(into, left, tag=5)]  # nobody sends it
        if comm.rank != 2:
            requests.append(comm.isend(big, right, tag=6))  # nobody receives it
        comm.barrier()
        if comm.rank == 2:
            comm.revoke()
        for request in requests[:1]:
            with pytest.raises(ftcomm.Revoked):
                request.wait()
        for request in requests[1:]:
            try:
                request.wait()  # what was buffered already is sent
            except ftcomm.Revoked:
                continue
        with pytest.raises(ftcomm.Revoked):
            comm.barrier()
        smaller = comm.shrink()
        smaller.barrier()
        assert smaller.size == 4

    ranks(4, run, transport=transport)


def test_shrink_with_a_failure_twice(ranks: Ranks, transport: str) -> None:
    """With a death, without one, with another; old order kept."""

    def run(comm: Comm, context: Context) -> Any:
        slots = []
        for victim in (0, None, 3):
            if comm.job.rank == victim:
                context.die()
            before = comm
            if victim is not None:
                until_failure(comm)
            comm = comm.shrink()
            comm.barrier()
            assert before.id != comm.id
            slots.append(comm.slots)
        return slots

    values = ranks(5, run, dies={0, 3}, transport=transport)
    assert values[1] == values[2] == values[4] == [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4)]


def test_revoke_shrink_barrier_a_hundred_times(ranks: Ranks, transport: str) -> None:
    """With receives pending that only the revoke ends; by turns one rank revokes or all do."""

    def run(comm: Comm) -> int:
        for turn in range(100):
            pending = [comm.irecv(np.zeros(3), source) for source in range(comm.size) if source != comm.rank]
            collective = comm.ibarrier() if comm.rank != turn % comm.size else None
            if turn % 2 or comm.rank == turn % comm.size:
                comm.revoke()
            for request in pending:
                with pytest.raises(ftcomm.Revoked):
                    request.wait()
            if collective is not None:
                with pytest.raises(ftcomm.Revoked):
                    collective.wait()
            old, comm = comm, comm.shrink()
            comm.barrier()
            old.close()
        return comm.size

    assert ranks(4, run, transport=transport) == [4] * 4


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.sample(2)
def test_random_kills_down_to_one(ranks: Ranks, transport: str, seed: int) -> None:
    """Each rank dies after a random number of operations, several maybe at once; the survivor ends alone."""
    size = 6
    choose = random.Random(seed)
    survivor = choose.randrange(size)
    lives = [choose.randrange(1, 60) for _ in range(size)]

    def run(comm: Comm, context: Context) -> Any:
        me, operations = comm.rank, 0
        while comm.size > 1:
            operations += 1
            if me != survivor and operations >= lives[me]:
                context.die()
            data = np.full(20_000, 1.0)
            try:
                comm.all_reduce(data)
                assert (data == comm.size).all()
            except ftcomm.PeerFailure:
                comm = comm.shrink()
        comm.barrier()
        return comm.slots

    values = ranks(size, run, dies=set(range(size)) - {survivor}, transport=transport)
    assert values[survivor] == (survivor,)


def test_acknowledge_the_first(ranks: Ranks, transport: str) -> None:
    """Those that are known first are first, whatever their ranks: what the user has not heard of yet is not acknowledged."""

    def run(comm: Comm, context: Context) -> Any:
        if comm.rank in (1, 3):
            context.mark("there")
            return context.hold()
        with pytest.raises(ftcomm.PeerFailure):
            comm.recv(np.zeros(1), 3)
        first = comm.failed()
        context.mark("one")
        with pytest.raises(ftcomm.PeerFailure):
            comm.recv(np.zeros(1), 1)
        seen = comm.failed()
        comm.ack_failed(len(first))
        buf = np.zeros(1)
        with pytest.raises(ftcomm.PeerFailure) as caught:
            comm.recv(buf, tag=1)
        comm.ack_failed(len(seen))
        sending = comm.isend(np.ones(1), 2 - comm.rank)
        comm.recv(buf)
        sending.wait()
        return first, seen, caught.value.ranks

    group = ranks.start(4, run, transport=transport)
    for rank in (1, 3):
        group.wait_for(rank, "there")
    group.kill(3)
    for rank in (0, 2):
        group.wait_for(rank, "one")
    group.kill(1)
    assert Ranks.values(group, {1, 3})[::2] == [((3,), (3, 1), (1,))] * 2


@pytest.mark.sample(1)
def test_silence_is_no_failure(ranks: Ranks, transport: str) -> None:
    """Nobody communicates for many heartbeats; one keeps its interpreter busy."""

    def run(comm: Comm) -> Any:
        for _ in range(3):
            comm.barrier()
            until = time.monotonic() + 1.5
            if comm.rank == 0:
                while time.monotonic() < until:
                    sum(range(10_000))
            else:
                time.sleep(1.5)
        seen = comm.epoch, comm.failed()
        comm.barrier()  # whoever leaves is gone for the others, too
        return seen

    values = ranks(4, run, transport=transport, heartbeat=0.5)
    assert set(values) == {(1, ())}


def test_kills_while_a_thread_reads_the_list(ranks: Ranks, transport: str) -> None:
    """Another thread asks who has failed, all the time; what it sees only grows, and at its end."""

    def run(comm: Comm, context: Context) -> Any:
        # A communicator is one thread's: the reader has its own.
        watched, ended, wrong = comm.dup(), threading.Event(), []

        def read() -> None:
            seen: tuple[int, ...] = ()
            while not ended.is_set():
                now = watched.failed()
                if now[: len(seen)] != seen:
                    wrong.append((seen, now))
                seen = now
                watched.alive, watched.revoked  # noqa: B018

        reader = threading.Thread(target=read)
        reader.start()
        for victim in (1, 4, 2):
            die(comm, comm.slots.index(victim), context)
            until_failure(comm)
            comm = comm.shrink()
        ended.set()
        reader.join()
        seen = watched.failed()
        comm.barrier()  # whoever leaves is gone for the other, too
        return wrong, seen

    values = ranks(5, run, dies={1, 2, 4}, transport=transport)
    assert values[0] == values[3] == ([], (1, 4, 2))
