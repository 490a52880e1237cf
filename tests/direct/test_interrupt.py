"""Ctrl-C and other signals in a blocking call."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks
from signals import raise_in_the_wait

import ftcomm

Comm = ftcomm.Communicator


def test_ctrl_c_ends_the_wait_on_all(ranks: Ranks, transport: str) -> None:
    """The interrupted rank gets KeyboardInterrupt, the others an error that names it; the communicator goes on."""

    def run(comm: Comm, context: Context) -> Any:
        comm.barrier()
        if comm.rank == 2:
            context.hold()
            with pytest.raises(ftcomm.Error) as caught:
                comm.all_reduce(np.ones(10))
            return type(caught.value).__name__, caught.value.ranks
        request = comm.iall_reduce(np.ones(10))
        raise_in_the_wait(KeyboardInterrupt())
        context.mark("posted")
        if comm.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                request.wait()
            context.mark("interrupted")
            assert request.error is not None
            return type(request.error).__name__, request.error.ranks  # type: ignore[attr-defined]
        with pytest.raises(ftcomm.Error) as caught:
            request.wait()
        return type(caught.value).__name__, caught.value.ranks

    group = ranks.start(3, run, transport=transport)
    for rank in (0, 1):
        group.wait_for(rank, "posted")
    group.kill(0, signal.SIGINT)
    group.wait_for(0, "interrupted")
    group.release(2)
    assert Ranks.values(group) == [("Cancelled", (0,))] * 3


def test_a_signal_handler_that_returns_does_not_disturb(ranks: Ranks) -> None:
    def run(comm: Comm, context: Context) -> int:
        seen = []
        signal.signal(signal.SIGUSR2, lambda *_: seen.append(threading.current_thread() is threading.main_thread()))
        if comm.rank == 1:
            context.hold()
        else:
            context.mark("waiting")
        comm.all_reduce(np.ones(10))
        context.mark("done")
        return len(seen)

    group = ranks.start(2, run)
    group.wait_for(0, "waiting")
    for _ in range(5):
        group.kill(0, signal.SIGUSR2)
    group.release(1)
    values = Ranks.values(group)
    assert 1 <= values[0] <= 5
    assert values[1] == 0


def test_ctrl_c_while_the_job_starts(ranks: Ranks) -> None:
    def run(group: Any, context: Context) -> str:
        store = group.store()
        with pytest.raises(KeyboardInterrupt):
            context.mark("starting")
            ftcomm.init(context.rank, 2, store=store, job=group.job, timeout=60)
        return "interrupted"

    group = ranks.start(1, run, direct=False)
    group.wait_for(0, "starting")
    group.kill(0, signal.SIGINT)
    assert Ranks.values(group) == ["interrupted"]


def test_wait_with_a_timeout_of_its_own(ranks: Ranks) -> None:
    def run(comm: Comm, context: Context) -> None:
        if comm.rank == 1:
            context.hold()
            comm.all_reduce(np.ones(10))
            return
        buf = np.ones(10)
        request = comm.iall_reduce(buf)
        with pytest.raises(ftcomm.Timeout, match="still pending"):
            request.wait(0.05)
        assert not request.test()
        context.mark("pending")
        request.wait()
        assert buf[0] == 2

    group = ranks.start(2, run)
    group.wait_for(0, "pending")
    group.release(1)
    Ranks.values(group)


def test_cancel(ranks: Ranks) -> None:
    def run(comm: Comm, context: Context) -> str:
        if comm.rank == 1:
            context.hold()
            with pytest.raises(ftcomm.Error) as caught:
                comm.all_reduce(np.ones(10))
            return type(caught.value).__name__
        request = comm.iall_reduce(np.ones(10))
        request.cancel()
        with pytest.raises(ftcomm.Cancelled):
            request.wait()
        context.mark("cancelled")
        return "Cancelled"

    group = ranks.start(2, run)
    group.wait_for(0, "cancelled")
    group.release(1)
    assert Ranks.values(group) == ["Cancelled", "Cancelled"]


def test_the_gil_is_free_while_waiting(ranks: Ranks) -> None:
    def run(comm: Comm, context: Context) -> None:
        if comm.rank == 1:
            context.hold()
        else:
            threading.Thread(target=context.mark, args=("another thread runs",)).start()
        comm.all_reduce(np.ones(10))

    group = ranks.start(2, run)
    group.wait_for(0, "another thread runs")
    group.release(1)
    Ranks.values(group)


@pytest.mark.parametrize("point", ["p2p.rts", "pull.enter"])
def test_ctrl_c_in_the_call_that_posts(ranks: Ranks, point: str) -> None:
    """No request has come back from it: the operation is given up all the same, and its buffer kept until it is done."""
    size = 4_000_000

    def run(comm: Comm, context: Context) -> Any:
        comm.barrier()
        if comm.rank == 1:
            context.hold()
            mine = np.zeros(size)
            with pytest.raises(ftcomm.Error) as caught:
                comm.all_reduce(mine) if point == "pull.enter" else comm.recv(mine, 0)
            return type(caught.value).__name__
        with pytest.raises(KeyboardInterrupt):
            context.mark("posts")
            if point == "pull.enter":
                comm.iall_reduce(np.ones(size)).wait()
            else:
                comm.isend(np.ones(size), 1).wait()
        gc.collect()
        context.mark("interrupted")
        return "KeyboardInterrupt"

    group = ranks.start(2, run, heartbeat=0.5, timeout=5.0, faults=f"rank=0,at={point},do=delay:1000")
    group.wait_for(0, "posts")
    time.sleep(0.3)  # so that it is in the call; the result is the same where it is not
    group.kill(0, signal.SIGINT)
    group.wait_for(0, "interrupted")
    group.release(1)
    assert Ranks.values(group)[1] in ("Cancelled", "PeerFailure")  # the other has left, but for what was decided before


def test_cancel_of_a_send(ranks: Ranks, transport: str) -> None:
    """Nobody receives it afterwards, when its caller has the buffer back."""

    def run(comm: Comm, context: Context) -> float:
        buf = np.full(100_000, float(comm.rank))
        if comm.rank == 1:
            context.hold()
            comm.recv(buf, 0)
            return float(buf[0])
        request = comm.isend(buf, 1)
        request.cancel()
        with pytest.raises(ftcomm.Cancelled):
            request.wait()
        buf[:] = -1
        context.mark("cancelled")
        buf[:] = 7
        comm.send(buf, 1)
        return 7.0

    group = ranks.start(2, run, transport=transport, heartbeat=0.5)
    group.wait_for(0, "cancelled")
    group.release(1)
    assert Ranks.values(group) == [7.0, 7.0]


def test_dropped_requests_of_two_threads(ranks: Ranks) -> None:
    """Each has a communicator of its own; what they let go of is one list."""

    def run(comm: Comm) -> list[str]:
        sys.setswitchinterval(1e-4)
        errors: list[str] = []

        def messages(comm: Comm) -> None:
            buf = np.zeros(4)
            try:
                for _ in range(5000):
                    comm.recv(buf, 0) if comm.rank else comm.isend(buf, 1)
            except ftcomm.Error as error:
                errors.append(str(error))

        threads = [threading.Thread(target=messages, args=(comm.dup(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    assert ranks(2, run) == [[], []]
