"""An all-reduce like one before takes a shorter way: what it must not change."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks
from signals import raise_in_the_wait

import ftcomm

Comm = ftcomm.Communicator


def accept(comm: Comm) -> None:
    """From here on all-reduces of float64 sums are known."""
    for _ in range(2):
        buf = np.ones(3)
        assert comm.all_reduce(buf).contributors == tuple(range(comm.size))
        assert buf.tolist() == [comm.size] * 3


def test_bad_buffers_are_refused_as_before(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        accept(comm)
        readonly = np.zeros(2)
        readonly.flags.writeable = False
        for says, thing in (
            (r"read-only.*copy", readonly),
            ("ascontiguousarray", np.zeros((3, 3))[:, 0]),
            ("ascontiguousarray", np.zeros((3, 2), order="F")),
            ("foreign byte order", np.zeros(2, ">f8")),
            ("no memory", [1.0]),
        ):
            with pytest.raises(ftcomm.ConfigError, match=says):
                comm.all_reduce(thing)
        with pytest.raises(ftcomm.ConfigError, match="is not known"):
            comm.all_reduce(np.zeros(2), "median")
        with pytest.raises(ftcomm.Unsupported, match="not defined for float64"):
            comm.all_reduce(np.zeros(2), "band")
        accept(comm)

    ranks(2, run)


def test_bad_tensors_are_refused_as_before(ranks: Ranks) -> None:
    torch = pytest.importorskip("torch")

    def run(comm: Comm) -> None:
        for _ in range(3):
            buf = torch.ones(3)
            outcome = comm.all_reduce(buf)
            assert buf.tolist() == [2.0] * 3
            assert outcome.chunks == ((0, 3, (0, 1)),)
        for says, thing in (
            ("not contiguous", torch.zeros(3, 3)[:, 0]),
            ("is on device meta", torch.zeros(3, device="meta")),
            ("sparse", torch.zeros(3).to_sparse()),
            ("negative view", torch._neg_view(torch.zeros(3))),
        ):
            with pytest.raises(ftcomm.ConfigError, match=says):
                comm.all_reduce(thing)
        half = torch.ones(3, dtype=torch.bfloat16)
        comm.all_reduce(half)
        comm.all_reduce(half)
        assert half.tolist() == [4.0] * 3
        accept(comm)  # arrays beside tensors

    ranks(2, run)


def test_what_dtype_accepts_is_not_remembered(ranks: Ranks) -> None:
    """The buffer's own type may be none of ours, or not go with the operator."""

    def run(comm: Comm) -> None:
        for _ in range(2):
            long = np.zeros(2, np.longdouble)
            long.view(np.uint8)[:] = comm.rank + 1
            comm.all_reduce(long, "max", dtype="uint8")
            assert set(long.view(np.uint8).tolist()) == {2}
            halves = np.zeros(4, np.uint16)
            comm.all_reduce(halves, "premul_sum", dtype="bfloat16", factor=2.0)
            with pytest.raises(ftcomm.Unsupported, match="see the table"):
                comm.all_reduce(halves, "premul_sum")

    ranks(2, run)


def test_a_request_that_was_dropped_is_let_go(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        accept(comm)
        dropped = np.ones(3)
        comm.iall_reduce(dropped)
        gone = weakref.ref(dropped)
        del dropped
        for _ in range(2):
            comm.all_reduce(np.ones(3))
        assert gone() is None

    ranks(2, run)


def test_a_handler_that_raises_an_exception_ends_the_call_alone(ranks: Ranks) -> None:
    """As in Request.wait: only what is no Exception, as Ctrl-C, gives the operation up on all ranks."""

    def run(comm: Comm, context: Context) -> list[float]:
        accept(comm)
        buf = np.ones(3)
        if comm.rank == 1:
            context.hold()
            comm.all_reduce(buf)
        else:
            raise_in_the_wait(TimeoutError("enough"))
            context.mark("entering")
            with pytest.raises(TimeoutError, match="enough"):
                comm.all_reduce(buf)
            context.mark("out")
        comm.barrier()
        return buf.tolist()  # type: ignore[no-any-return]

    group = ranks.start(2, run)
    group.wait_for(0, "entering")
    group.kill(0, signal.SIGUSR2)
    group.wait_for(0, "out")
    group.release(1)
    assert Ranks.values(group) == [[2.0] * 3] * 2


def test_a_job_that_another_thread_closes(ranks: Ranks) -> None:
    def run(comm: Comm, context: Context) -> str:
        accept(comm)
        if comm.rank == 1:
            context.hold()
            return ""
        threading.Timer(0.2, comm.job.close).start()
        with pytest.raises(ftcomm.Closed) as caught:
            comm.all_reduce(np.ones(3))
        context.mark("closed")
        return str(caught.value)

    group = ranks.start(2, run)
    group.wait_for(0, "closed")
    group.release(1)
    assert "before the operation was done" in Ranks.values(group)[0]


def test_results_by_type_operator_and_algorithm(ranks: Ranks) -> None:
    """What is remembered of one call is not taken for another's."""

    def run(comm: Comm) -> None:
        for _ in range(2):
            for dtype in (np.float32, np.int64, np.uint8):
                for op, expected in (("sum", 3), ("max", 2), ("product", 2)):
                    for algorithm in ("auto", "ring", "flat"):
                        buf = np.full(5, comm.rank + 1, dtype)
                        outcome = comm.all_reduce(buf, op, algorithm)
                        assert buf.tolist() == [expected] * 5, (dtype, op, algorithm)
                        assert outcome.chunks == ((0, 5, (0, 1)),)
        twice = np.full(5, comm.rank + 1.0)
        comm.all_reduce(twice, "premul_sum", factor=2.0)
        assert twice.tolist() == [6.0] * 5
        assert comm.all_reduce(np.zeros(0)).chunks == comm.iall_reduce(np.zeros(0)).wait().chunks

    ranks(2, run)


def test_closed_and_forked(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        accept(comm)
        pid = os.fork()
        if pid == 0:
            try:
                comm.all_reduce(np.ones(3))
            except ftcomm.Closed:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        other = comm.dup()
        accept(other)
        other.close()
        with pytest.raises(ftcomm.Closed):
            other.all_reduce(np.ones(3))
        accept(comm)

    ranks(2, run)


def test_threads_with_a_communicator_each(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        comms = [comm, comm.dup(), comm.dup()]
        wrong: list[Any] = []

        def work(own: Comm, number: int) -> None:
            for turn in range(150):
                buf = np.full(4, float(number + turn))
                own.all_reduce(buf)
                if buf.tolist() != [2.0 * (number + turn)] * 4:
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(own, number)) for number, own in enumerate(comms)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    ranks(2, run)


def test_ctrl_c_ends_the_wait_on_all(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> Any:
        accept(comm)
        if comm.rank == 2:
            context.hold()
            with pytest.raises(ftcomm.Error) as caught:
                comm.all_reduce(np.ones(3))
            return type(caught.value).__name__, caught.value.ranks
        raise_in_the_wait(KeyboardInterrupt())
        context.mark("entering")
        if comm.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                comm.all_reduce(np.ones(3))
            context.mark("interrupted")
            return None
        with pytest.raises(ftcomm.Error) as caught:
            comm.all_reduce(np.ones(3))
        return type(caught.value).__name__, caught.value.ranks

    group = ranks.start(3, run, transport=transport)
    for rank in (0, 1):
        group.wait_for(rank, "entering")
    group.kill(0, signal.SIGINT)
    group.wait_for(0, "interrupted")
    group.release(2)
    assert Ranks.values(group) == [None, ("Cancelled", (0,)), ("Cancelled", (0,))]


def test_a_signal_handler_that_returns_does_not_disturb(ranks: Ranks) -> None:
    def run(comm: Comm, context: Context) -> list[float]:
        accept(comm)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        if comm.rank == 1:
            context.hold()
        else:
            context.mark("waiting")
        buf = np.ones(3)
        comm.all_reduce(buf)
        accept(comm)
        return buf.tolist()  # type: ignore[no-any-return]

    group = ranks.start(2, run)
    group.wait_for(0, "waiting")
    for _ in range(5):
        group.kill(0, signal.SIGUSR2)
    group.release(1)
    assert Ranks.values(group) == [[2.0] * 3] * 2
