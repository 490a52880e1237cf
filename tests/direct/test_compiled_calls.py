"""The calls that wait, compiled: the same results and errors as the requests of the same operations give."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks

import ftcomm

Comm = ftcomm.Communicator
Buffers = tuple[Any, ...]


def big(comm: Comm) -> np.ndarray:
    return np.arange(4.0 * comm.size, dtype=np.float32) + comm.rank


def part(comm: Comm) -> np.ndarray:
    return np.arange(4.0, dtype=np.float32) + comm.rank


OPERATIONS: dict[str, Any] = {
    "all_reduce": lambda c: (big(c),),
    "broadcast": lambda c: (big(c), 1),
    "reduce": lambda c: (big(c), 1, "max"),
    "all_gather": lambda c: (np.zeros(4 * c.size, np.float32), part(c)),
    "reduce_scatter": lambda c: (np.zeros(4, np.float32), big(c), "product"),
    "all_to_all": lambda c: (np.zeros(4 * c.size, np.float32), big(c)),
    "barrier": lambda c: (),
}


def tensors(args: Buffers) -> Buffers:
    torch = pytest.importorskip("torch")
    return tuple(torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("of_torch", [False, True])
def test_as_the_requests(ranks: Ranks, size: int, of_torch: bool) -> None:
    def run(comm: Comm) -> None:
        for name, general in OPERATIONS.items():
            rooted = name in ("broadcast", "reduce")
            make = _with_root_in_range(general, comm.size) if rooted else general
            for _ in range(3):
                ours, theirs = make(comm), make(comm)
                if of_torch:
                    ours, theirs = tensors(ours), tensors(theirs)
                outcome = getattr(comm, name)(*ours)
                assert outcome == getattr(comm, "i" + name)(*theirs).wait(), name
                for one, other in zip(ours, theirs, strict=True):
                    assert np.array_equal(np.asarray(one), np.asarray(other)), name

    ranks(size, run)


def _with_root_in_range(make: Any, size: int) -> Any:
    def made(comm: Comm) -> Buffers:
        buf, root, *rest = make(comm)
        return (buf, min(root, size - 1), *rest)

    return made


def test_none_of_them_goes_the_long_way(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        comm.all_reduce(np.ones(2))  # from now on arrays are known
        numbers = {"all_reduce": 0, "broadcast": 1, "reduce": 2, "all_gather": 3, "reduce_scatter": 4, "all_to_all": 7}
        for name, number in numbers.items():
            args = OPERATIONS[name](comm)
            given = args[1] if len(args) > 1 and isinstance(args[1], np.ndarray) else args[0]
            assert comm._calls.collective(number, args[0], given, "sum", "auto", 0) is not None, name
        assert comm._calls.collective(8, None, None, None, None, 0) is not None
        if comm.rank == 0:
            assert comm._calls.send(np.ones(3), 1, 7) is True
        else:
            assert comm._calls.recv(np.ones(3), 0, 7) == 0

    ranks(2, run)


def test_what_is_wrong_is_said_as_by_the_requests(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        comm.all_reduce(np.ones(2))
        readonly, floats, ints = np.zeros(4), np.zeros(4), np.zeros(4, np.int64)
        readonly.flags.writeable = False
        wrong: list[tuple[str, Buffers]] = [
            ("broadcast", (floats, 2)),
            ("broadcast", (floats, -1)),
            ("broadcast", (floats, True)),
            ("broadcast", (readonly, 1 - comm.rank)),
            ("reduce", (readonly, comm.rank)),
            ("reduce", (floats, 0, "median")),
            ("reduce", (floats, 0, "band")),
            ("all_gather", (np.zeros(7), floats)),
            ("all_gather", (np.zeros(8, np.int64), floats)),
            ("all_gather", (readonly, np.zeros(2))),
            ("reduce_scatter", (np.zeros(3), floats)),
            ("reduce_scatter", (ints[:2], floats)),
            ("all_to_all", (np.zeros(3), np.zeros(3))),
            ("all_to_all", (floats, np.zeros(6))),
            ("all_to_all", (floats, ints)),
            ("all_reduce", (floats, "sum", "fastest")),
            ("all_reduce", (floats[::2],)),
            ("all_reduce", (3,)),
        ]
        for name, args in wrong:
            said = []
            for call in (getattr(comm, name), lambda *a, n=name: getattr(comm, "i" + n)(*a).wait()):
                with pytest.raises((ftcomm.Error, TypeError)) as caught:
                    if name == "broadcast" and args[1] is True:
                        raise TypeError  # an int to Python, and rank 1: both take it
                    call(*args)
                said.append((type(caught.value), str(caught.value)))
            assert said[0] == said[1], (name, args)
        comm.barrier()

    ranks(2, run)


def test_messages(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm) -> None:
        comm.all_reduce(np.ones(2))
        for turn in range(3):
            out, there = np.full(5, comm.rank + turn), np.zeros(5, np.int64)
            if comm.rank == 0:
                comm.send(out, 1)
                assert comm.recv(there) == 1
            else:
                assert comm.recv(there, 0) == 0
                comm.send(out, 0)
            assert there.tolist() == [1 - comm.rank + turn] * 5
        if comm.rank == 0:
            comm.send(np.ones(5), 1, tag=1 << 62)
            comm.send(np.ones(2), 1, tag=-(1 << 62))
        else:
            with pytest.raises(ftcomm.Truncated):
                comm.recv(np.zeros(4), 0, tag=1 << 62)
            short = np.zeros(4)
            assert comm.recv(short, ftcomm.ANY, tag=-(1 << 62)) == 0
            assert short.tolist() == [1, 1, 0, 0]
        with pytest.raises(ftcomm.ConfigError, match="dst=2"):
            comm.send(np.ones(2), 2)
        with pytest.raises(ftcomm.ConfigError, match="src=-3"):
            comm.recv(np.ones(2), -3)
        comm.barrier()

    ranks(2, run, transport=transport)


def test_a_dead_sender_is_no_wait_for_ever(ranks: Ranks) -> None:
    def run(comm: Comm, context: Context) -> Any:
        comm.all_reduce(np.ones(2))
        if comm.rank == 1:
            context.mark("here")
            context.hold()
        with pytest.raises(ftcomm.PeerFailure) as caught:
            comm.recv(np.ones(2), 1)
        with pytest.raises(ftcomm.PeerFailure):
            comm.recv(np.ones(2))
        return caught.value.ranks

    group = ranks.start(2, run)
    group.wait_for(1, "here")
    group.kill(1, signal.SIGKILL)
    assert Ranks.values(group, dies=[1])[0] == (1,)


def test_who_is_missing_is_said_under_lossy(ranks: Ranks) -> None:
    """Not as usual, and no error: the outcome has fewer contributors."""

    def run(comm: Comm, context: Context) -> Any:
        buf = np.ones(2)
        comm.all_reduce(buf)
        if comm.rank == 2:
            context.mark("here")
            context.hold()
        outcome = comm.all_reduce(np.ones(2))
        again = np.ones(2)
        assert comm.all_reduce(again).contributors == (0, 1)
        return outcome.contributors, again.tolist()

    group = ranks.start(3, run, policy="lossy")
    group.wait_for(2, "here")
    group.kill(2, signal.SIGKILL)
    assert Ranks.values(group, dies=[2])[:2] == [((0, 1), [2.0, 2.0])] * 2


def test_ctrl_c_in_a_receive(ranks: Ranks) -> None:
    def run(comm: Comm, context: Context) -> None:
        from signals import raise_in_the_wait

        comm.all_reduce(np.ones(2))
        if comm.rank == 0:
            raise_in_the_wait(KeyboardInterrupt())
            context.mark("entering")
            with pytest.raises(KeyboardInterrupt):
                comm.recv(np.ones(2), 1)
            context.mark("interrupted")
        else:
            context.hold()
        comm.barrier()

    group = ranks.start(2, run)
    group.wait_for(0, "entering")
    group.kill(0, signal.SIGINT)
    group.wait_for(0, "interrupted")
    group.release(1)
    Ranks.values(group)
