"""The calls that wait, compiled: the same results and errors as the requests of the same operations give."""

from __future__ import annotations

import inspect
import pydoc
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


WITH_NAMES: dict[str, Any] = {
    "all_reduce": lambda c: {"op": "max", "buf": big(c)},
    "broadcast": lambda c: {"root": 1, "buf": big(c), "dtype": None},
    "reduce": lambda c: {"buf": big(c), "op": "min", "root": 1},
    "all_gather": lambda c: {"buf": part(c), "out": np.zeros(4 * c.size, np.float32)},
    "reduce_scatter": lambda c: {"buf": big(c), "out": np.zeros(4, np.float32), "op": "max"},
    "all_to_all": lambda c: {"buf": big(c), "out": np.zeros(4 * c.size, np.float32)},
}


def test_none_of_them_goes_the_long_way(ranks: Ranks) -> None:
    class Short(ftcomm.Communicator):
        @property
        def _ordered(self) -> Any:
            raise AssertionError("the long way")

    def run(comm: Comm) -> None:
        comm.all_reduce(np.ones(2))  # from now on arrays are known
        expected = {
            name: (getattr(comm, "i" + name)(**given).wait(), given)
            for name, given in ((name, make(comm)) for name, make in WITH_NAMES.items())
        }
        comm.__class__ = Short
        with pytest.raises(AssertionError, match="the long way"):
            comm.iall_reduce(np.ones(2))
        for name, make in OPERATIONS.items():
            getattr(comm, name)(*make(comm))
        for name, make in WITH_NAMES.items():
            given = make(comm)
            assert getattr(comm, name)(**given) == expected[name][0], name
            for role, there in given.items():
                assert role not in ("buf", "out") or np.array_equal(there, expected[name][1][role]), (name, role)
        if comm.rank == 0:
            assert comm.send(np.ones(3), 1, 7) is None
            comm.send(tag=8, dst=1, buf=np.ones(3))
        else:
            assert comm.recv(np.ones(3), 0, 7) == 0
            assert comm.recv(src=ftcomm.ANY, buf=np.ones(3), tag=8) == 0
        comm.__class__ = ftcomm.Communicator

    ranks(2, run)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.all_reduce(), "missing 1 required positional argument: 'buf'"),
        (lambda c: c.all_reduce(np.ones(2), buf=np.ones(2)), "multiple values for argument 'buf'"),
        (lambda c: c.all_reduce(np.ones(2), "sum", "auto", None, 1.0), "takes from 2 to 5 positional arguments"),
        (lambda c: c.broadcast(np.ones(2), 0, None, 1.0), "takes from 2 to 4 positional arguments"),
        (lambda c: c.all_gather(np.ones(2)), "missing 1 required positional argument: 'buf'"),
        (lambda c: c.barrier(np.ones(2)), "takes 1 positional argument"),
        (lambda c: c.send(np.ones(2)), "missing 1 required positional argument: 'dst'"),
        (lambda c: c.recv(np.ones(2), 0, speed=1), "unexpected keyword argument 'speed'"),
        (lambda c: type(c).all_reduce(), "missing 2 required positional arguments"),
        (lambda c: type(c).barrier(3), "'int' object has no attribute"),
    ],
)
def test_arguments_that_do_not_fit_are_pythons_errors(ranks: Ranks, call: Any, words: str) -> None:
    def run(comm: Comm) -> None:
        comm.all_reduce(np.ones(2))
        with pytest.raises((TypeError, AttributeError), match=words):
            call(comm)

    ranks(1, run)


def test_the_methods_look_like_pythons(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        for name in [*OPERATIONS, "send", "recv"]:
            method = getattr(comm, name)
            assert method.__doc__, name
            assert method.__name__ == name
            assert method.__qualname__.endswith(f".{name}")
            assert method.__self__ is comm
            assert getattr(type(comm), name).__module__.startswith("ftcomm.")
            assert inspect.signature(method) == inspect.signature(method.__wrapped__.__get__(comm)), name
        assert "Combines the buffers" in pydoc.render_doc(type(comm).all_reduce)

    ranks(1, run)


def test_a_subclass_may_have_its_own(ranks: Ranks) -> None:
    class Counting(ftcomm.Communicator):
        count = 0

        def all_reduce(self, *args: Any, **more: Any) -> Any:
            self.count += 1
            return super().all_reduce(*args, **more)

    def run(comm: Comm) -> None:
        comm.__class__ = Counting
        x = np.ones(2)
        comm.all_reduce(x, op="sum")
        assert (comm.count, x.tolist()) == (1, [2.0, 2.0])  # type: ignore[attr-defined]
        comm.__class__ = ftcomm.Communicator

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
