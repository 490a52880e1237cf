"""Ranks that go from one small operation to the next: in between nobody wakes their progress threads."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

import native_ranks as nr

# Ticks, at a 20th of it, would take what has come as well: the first one is due after the test's deadline.
NO_TICKS = 40 * nr.DEADLINE


def test_what_comes_between_two_operations_is_taken_without_a_thread_that_waits(ranks: nr.Ranks) -> None:
    """After a burst rank 0 waits for a callback and not in the library; what rank 1 sends then finds its mailbox "awake"."""

    def body(_: nr.Channel, job: nr.Job, comm: int) -> Any:
        called = threading.Event()
        callback = nr.DoneFn(lambda _: called.set())
        missing = 0
        for _turn in range(30):
            for _quick in range(40):
                job.all_reduce(comm, [1.0])
            values = (ctypes.c_double * 1)(1.0)
            request = job.post(comm, nr.ALL_REDUCE, values)
            if job.rank == 0:
                called.clear()
                job.check(job.c.ft_request_on_done(request, callback, None))
                missing += not called.wait(nr.DEADLINE / 2)
            job.wait(request)
            assert list(values) == [2.0]
        job.leave()
        job.close()
        return missing

    ranks.start(2, body, heartbeat=NO_TICKS)
    assert [ranks.result(rank) for rank in range(2)] == [0, 0]


def test_a_death_in_a_burst_is_decided_without_a_thread_that_waits(ranks: nr.Ranks) -> None:
    victim = 2

    def body(_: nr.Channel, job: nr.Job, comm: int) -> Any:
        for _quick in range(60):
            job.all_reduce(comm, [1.0])
        if job.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        job.wait_event("removed", slot=victim)
        values = job.all_reduce(comm, [1.0])
        job.leave()
        job.close()
        return values

    ranks.start(3, body, heartbeat=NO_TICKS)
    assert [ranks.result(rank) for rank in range(2)] == [[2.0], [2.0]]
