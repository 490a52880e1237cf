"""Wrong arguments are refused locally, with a sentence that says what to do; nothing hangs and the communicator goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Ranks

import ftcomm

f4 = np.float32
CASES: list[tuple[str, Callable[[ftcomm.Communicator], Any]]] = [
    ("is not one of auto, ring", lambda c: c.all_reduce(np.zeros(2), algorithm="fast")),
    ("is not one of auto, ring", lambda c: c.all_reduce(np.zeros(2), algorithm="direct")),
    ("is not known", lambda c: c.all_reduce(np.zeros(2), "median")),
    ("not defined for float64", lambda c: c.all_reduce(np.zeros(2), "band")),
    ("not defined for complex64", lambda c: c.all_reduce(np.zeros(2, np.complex64), "max")),
    ("ascontiguousarray", lambda c: c.all_reduce(np.zeros((3, 3))[:, 0])),
    ("read-only", lambda c: c.all_reduce(b"1234")),
    ("root=2 must be a rank", lambda c: c.broadcast(np.zeros(2), 2)),
    ("root=-1 must be a rank", lambda c: c.reduce(np.zeros(2), -1)),
    ("it must have size \\* input", lambda c: c.all_gather(np.zeros(3), np.zeros(2))),
    ("different types", lambda c: c.all_gather(np.zeros(4, f4), np.zeros(2))),
    ("size \\* output", lambda c: c.reduce_scatter(np.zeros(2), np.zeros(5))),
    ("must give the output", lambda c: c.gather(np.zeros(2), None, c.rank)),
    ("must give the input", lambda c: c.scatter(np.zeros(2), None, c.rank)),
    ("add up to", lambda c: c.gather(np.zeros(2), np.zeros(4), c.rank, [2, 3])),
    ("one number, not negative", lambda c: c.gather(np.zeros(2), np.zeros(4), c.rank, [4])),
    ("one number, not negative", lambda c: c.scatter(np.zeros(2), np.zeros(4), c.rank, [5, -1])),
    ("no multiple of the 2 ranks", lambda c: c.all_to_all(np.zeros(3), np.zeros(3))),
    ("needs both", lambda c: c.all_to_all(np.zeros(3), np.zeros(3), [1, 2])),
    ("dst=5 must be a rank", lambda c: c.send(np.zeros(2), 5)),
    ("dst=-1 must be a rank", lambda c: c.send(np.zeros(2), ftcomm.ANY)),
    ("src=7 must be a rank.*ANY", lambda c: c.recv(np.zeros(2), 7)),
    ("positive number of seconds", lambda c: c.barrier(timeout=0)),
    *((r"flag=.* must be a whole number", lambda c, x=x: c.agree(x)) for x in (1 << 63, -1 << 64, "x", 1.5, None)),
    ("color=.* must be a whole number", lambda c: c.split(1 << 63)),
    ("color=1.5 must be a whole number", lambda c: c.split(1.5)),
    ("key=.* must be a whole number", lambda c: c.split(0, 1 << 64)),
    ("tag=.* from -2..63 to 2..63-1", lambda c: c.isend(np.zeros(2), 1 - c.rank, 1 << 63)),
    ("tag=.* must be a whole number", lambda c: c.send(np.zeros(2), 1 - c.rank, 1 << 63)),
    ("tag='a' must be a whole number", lambda c: c.recv(np.zeros(2), 1 - c.rank, "a")),
    ("timeout='1' must be a positive number of seconds", lambda c: c.all_reduce(np.zeros(2), timeout="1")),
    ("factor='x' must be a number", lambda c: c.all_reduce(np.zeros(2), "premul_sum", factor="x")),
    ("factor=2.0 has no part in op 'sum'", lambda c: c.all_reduce(np.zeros(2), factor=2.0)),
    ("factor=0.5 has no part in op 'avg'", lambda c: c.reduce_scatter(np.zeros(1), np.zeros(2), "avg", factor=0.5)),
    ("counts='x' must be a whole number", lambda c: c.gather(np.zeros(2), np.zeros(4), c.rank, ["x", 2])),
    ("timeout='x' must be a number of seconds", lambda c: ftcomm.request.wait_all([], timeout="x")),
    ("timeout='x' must be a number of seconds", lambda c: c.leave(timeout="x")),
    ("slots='x' must be a whole number", lambda c: ftcomm.Communicator.create(c.job, "odd", [c.rank, "x"])),
    ("id=.* from 0 to 2..64-1", lambda c: ftcomm.Communicator.create(c.job, "odd", id=1 << 64)),
    ("timeout='x' must be a positive number", lambda c: ftcomm.Communicator.create(c.job, "odd", timeout="x")),
    ("iteration='x' must be a whole number", lambda c: c.log_position("x")),
    ("pair log", lambda c: c.ft_send(np.zeros(2), 0)),
    ("pair log", lambda c: c.ft_recv(np.zeros(2), 0)),
    ("policy replay", lambda c: c.commit_checkpoint("a")),
    (
        "is not one of raise",
        lambda c: c.dup(policy="ignore") if c.size == 1 else ftcomm.Communicator.create(c.job, policy="x"),
    ),
    ("different ranks", lambda c: ftcomm.Communicator.create(c.job, "twice", [0, 0, 1])),
    ("already runs job", lambda c: ftcomm.init(0, 1, store=c.job.store, job=c.job.name)),
]


def test_wrong_arguments(ranks: Ranks) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        for says, call in CASES:
            with pytest.raises(ftcomm.ConfigError, match=says):
                call(comm)
        buf = np.ones(3)
        comm.all_reduce(buf)
        assert buf.tolist() == [2, 2, 2]

    ranks(2, run)


def test_numbers_of_numpy_are_numbers(ranks: Ranks) -> None:
    def run(comm: ftcomm.Communicator) -> list[int]:
        buf = np.full(2, comm.rank + 1.0)
        comm.all_reduce(buf, "premul_sum", factor=np.float32(0.5), timeout=np.int64(60))
        assert buf.tolist() == [1.5, 1.5]
        box = np.zeros(1)
        sent = comm.isend(np.ones(1), 1 - comm.rank, np.int64(-7))
        comm.recv(box, 1 - comm.rank, np.int64(-7))
        sent.wait()
        part = comm.split(np.uint8(3), np.int32(-comm.rank))
        assert part is not None
        flags = (np.bool_(True), True, np.int64(-1), (1 << 63) - 1, -1 << 63)
        return [*(comm.agree(flag) for flag in flags), part.rank]

    agreed = [1, 1, -1, (1 << 63) - 1, -1 << 63]
    assert ranks(2, run) == [[*agreed, 1], [*agreed, 0]]


MISMATCHES: dict[str, Callable[[ftcomm.Communicator], Any]] = {
    "size": lambda c: c.all_reduce(np.zeros(3 if c.rank == 1 else 2, f4)),
    "large size": lambda c: c.all_reduce(np.zeros(300_000 if c.rank == 1 else 200_000, f4)),
    "small against large": lambda c: c.all_reduce(np.zeros(300_000 if c.rank == 1 else 2, f4)),
    "type": lambda c: c.all_reduce(np.zeros(2, np.int32 if c.rank == 1 else f4)),
    "operator": lambda c: c.all_reduce(np.zeros(2, f4), "max" if c.rank == 1 else "sum"),
    "algorithm": lambda c: c.all_reduce(np.zeros(2, f4), algorithm="ring" if c.rank == 1 else "flat"),
    "operation": lambda c: c.barrier() if c.rank == 1 else c.all_reduce(np.zeros(2, f4)),
    "root": lambda c: c.broadcast(np.zeros(2, f4), c.rank == 1),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_disagree(ranks: Ranks, what: str) -> None:
    """The same error on every rank, which names who differs from the lowest rank that had entered, not a hang."""

    def run(comm: ftcomm.Communicator) -> tuple[str, tuple[int, ...], str]:
        with pytest.raises(ftcomm.Mismatch) as caught:
            MISMATCHES[what](comm)
        message = str(caught.value).partition("ranks called different operations")[2]  # before it: this rank's own call
        return type(caught.value).__name__, caught.value.ranks, message

    results = set(ranks(3, run))
    assert len(results) == 1
    _, differing, message = results.pop()
    # Rank 0 may not have entered when it was noticed: then rank 1 is the lowest and rank 2 the one that differs from it.
    assert differing in ((1,), (2,))
    assert "rank 1 called" in message


@pytest.mark.parametrize("what", ["all_to_all", "gather", "scatter"])
def test_sizes_that_do_not_fit(ranks: Ranks, what: str) -> None:
    """All call the same, and the text does not say that they called something else: one gives more than another takes."""

    def run(comm: ftcomm.Communicator) -> str:
        taken, given = [1, 1], [1, 2 if comm.rank == 0 else 1]
        buf = np.zeros(1 + (comm.rank if what == "gather" else 0), f4)
        with pytest.raises(ftcomm.Mismatch, match="with sizes that do not fit") as caught:
            if what == "all_to_all":
                comm.all_to_all(np.zeros(2, f4), np.zeros(sum(given), f4), taken, given)
            elif what == "gather":
                comm.gather(
                    buf, np.zeros(2, f4) if comm.rank == 0 else None, 0, counts=taken if comm.rank == 0 else None
                )
            else:
                comm.scatter(
                    buf, np.zeros(3, f4) if comm.rank == 0 else None, 0, counts=given if comm.rank == 0 else None
                )
        comm.barrier()
        return str(caught.value).partition("ranks called ")[2]

    first, *others = ranks(2, run)
    assert first.startswith(f"{what}(float32")
    assert others == [first]


def test_ranks_that_make_a_communicator_with_different_members(ranks: Ranks) -> None:
    """Nobody gets the sum of some, nobody waits for who does not know of it, and the world goes on."""

    def run(comm: ftcomm.Communicator) -> float:
        with pytest.raises(ftcomm.Mismatch):  # who comes last hears of it at once
            group = ftcomm.Communicator.create(comm.job, "some", [1, 2] if comm.rank == 2 else [0, 1, 2])
            with pytest.raises(ftcomm.Mismatch, match="every member has to give the same ones"):
                group.all_reduce(np.ones(2, f4))
            with pytest.raises(ftcomm.Mismatch):
                group.shrink()
            group.all_reduce(np.ones(2, f4))
        all_of_them = np.ones(1, f4)
        comm.all_reduce(all_of_them)
        return float(all_of_them[0])

    assert ranks(3, run) == [3.0] * 3
