"""Ctrl-C and other signals in a blocking call."""

from __future__ import annotations

import signal
import threading
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
