"""Bells that are held back: a rank whose threads are all out of the library is not woken at once, but it is woken.

Nothing else would look: its next tick is minutes away.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks

from ftcomm import Communicator as Comm

SLOW = {"heartbeat": 4000.0, "timeout": 5000.0}  # a tick each 200 s
FEW, MANY = 1000, 1 << 20


def compute_until(request: Any) -> None:
    while not request.test():
        pass


def come_to_rest(comm: Comm) -> None:
    """What there was to say at the start has been said, the thread that looks for mail sleeps, and arrays take the short way."""
    comm.all_reduce(np.zeros(1, np.float32))
    comm.barrier()
    time.sleep(0.1)


def begin(ranks: Ranks, size: int, run: Any) -> Group:
    """Rank 1 computes, then the others are let go."""
    group = ranks.start(size, run, **SLOW)
    group.wait_for(1, "computes")
    for rank in {*range(size)} - {1}:
        group.release(rank)
    return group


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_receiver_that_computes(ranks: Ranks, count: int) -> None:
    def run(comm: Comm, context: Context) -> None:
        come_to_rest(comm)
        if comm.rank == 0:
            context.hold()
            comm.send(np.full(count, 7, np.float32), 1)
            context.hold()  # out of the library: nobody rings later
            return
        data = np.zeros(count, np.float32)
        request = comm.irecv(data, 0)
        context.mark("computes")
        compute_until(request)
        assert (data == 7).all()
        context.mark("done")

    group = begin(ranks, 2, run)
    group.wait_for(1, "done")
    group.release(0)
    for result in group.results():
        assert result.ok, result.text()


@pytest.mark.parametrize("count", [2, MANY // 4, 2 * MANY])
@pytest.mark.parametrize("size", [2, 3])
def test_a_member_that_computes(ranks: Ranks, size: int, count: int) -> None:
    def run(comm: Comm, context: Context) -> float:
        data = np.full(count, comm.rank + 1, np.float32)
        come_to_rest(comm)
        if comm.rank != 1:
            context.hold()
            comm.all_reduce(data)
        else:
            request = comm.iall_reduce(data)
            context.mark("computes")
            compute_until(request)
        assert (data == data[0]).all()
        return float(data[0])

    results = begin(ranks, size, run).results()
    assert [r.value for r in results] == [size * (size + 1) / 2] * size, "\n".join(r.text() for r in results)


def test_a_sender_beside_a_thread_that_waits(ranks: Ranks) -> None:
    """That one drives, and sleeps already: what the other one sends is not its to ring for."""

    def run(comm: Comm, context: Context) -> None:
        data = np.zeros(FEW, np.float32)
        come_to_rest(comm)
        if comm.rank == 0:
            waits = threading.Thread(target=comm.recv, args=(np.zeros(1, np.float32), 1))
            waits.start()
            context.hold()
            comm.send(np.full(FEW, 7, np.float32), 1)
            waits.join()
            return
        request = comm.irecv(data, 0)
        context.mark("computes")
        compute_until(request)
        assert (data == 7).all()
        comm.send(np.ones(1, np.float32), 0)

    for result in begin(ranks, 2, run).results():
        assert result.ok, result.text()


def test_a_rank_that_falls_asleep_in_the_middle_of_a_burst(ranks: Ranks) -> None:
    """In one a rank of two looks at the other's ring itself, and is left no word (ShmTransport::watch): until it sleeps."""

    def run(comm: Comm, context: Context) -> None:
        come_to_rest(comm)
        data = np.zeros(1, np.float32)
        for i in range(5):
            for _ in range(300):
                comm.all_reduce(data)
            if comm.rank == 0:
                time.sleep(0.02)
                comm.send(np.full(1, i, np.float32), 1)
            else:
                comm.recv(data, 0)
                assert data == i
        context.mark("done")
        context.hold()

    group = ranks.start(2, run, **SLOW)
    for rank in (0, 1):
        group.wait_for(rank, "done")
    for rank in (0, 1):
        group.release(rank)
