"""Large collectives of ranks that read each other's memory: values, refusals, and a reader that wakes up too late."""

from __future__ import annotations

import os
from itertools import product

import numpy as np
import pytest
from collective_values import every_collective, expect, whole
from harness import Context, Group, Ranks
from tables import most

import ftcomm

Comm = ftcomm.Communicator


pytestmark = pytest.mark.usefixtures("pulls")

PARTS = 7_500_000  # elements, for two or three ranks: more than two reads each


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective(ranks: Ranks, size: int) -> None:
    ranks(size, lambda comm: every_collective(comm, (20_001, 100_000)))


@pytest.mark.parametrize("at", ["own", "first", "between", "behind"])
def test_an_all_gather_out_of_its_own_result(ranks: Ranks, at: str) -> None:
    """The input may lie anywhere in the result: it is taken when the call is made."""
    part = 200_000

    def run(comm: Comm, _: Context) -> None:
        me, n = comm.rank, comm.size
        start = {"own": me * part, "first": 0, "between": part // 2, "behind": (n - 1) * part}[at]
        for turn in range(3):
            out = np.full(n * part, -1, np.float32)
            out[start : start + part] = whole(me + turn, part, np.float32)
            comm.all_gather(out, out[start : start + part])
            expect(out, np.concatenate([whole(r + turn, part, np.float32) for r in range(n)]))

    for result in ranks.start(3, run).results():
        assert result.ok, result.text()


def test_bits_are_equal_and_repeat(ranks: Ranks) -> None:
    def run(comm: Comm, _: Context) -> set[bytes]:
        seen = set()
        for _turn in range(3):
            data = np.random.default_rng(comm.rank).standard_normal(200_000).astype(np.float32)
            comm.all_reduce(data)
            seen.add(data.tobytes())
        return seen

    values = [result.value for result in ranks.start(3, run).results()]
    assert values[0] == values[1] == values[2]
    assert len(values[0]) == 1


def exchange(comm: Comm, operation: str) -> None:
    """400 kB of each rank, by value."""
    me, n, count = comm.rank, comm.size, 100_000
    mine = [whole(r, count, np.float32) for r in range(n)]
    total = sum(mine)
    data, out = whole(me, count, np.float32), np.zeros(n * count, np.float32)
    if operation == "all_reduce":
        comm.all_reduce(data)
        expect(data, total)
    elif operation == "broadcast":
        comm.broadcast(data, 0)
        expect(data, mine[0])
    elif operation == "all_gather":
        comm.all_gather(out, data)
        expect(out, np.concatenate(mine))
    elif operation == "reduce_scatter":
        comm.reduce_scatter(data, np.concatenate(mine))
        expect(data, mine[me] * n)
    elif operation == "all_to_all":
        comm.all_to_all(out, np.concatenate(mine))
        expect(out, np.tile(mine[me], n))
    else:
        assert operation == "gather"
        comm.gather(data, out if me == 1 else None, 1)
        if me == 1:
            expect(out, np.concatenate(mine))


@pytest.mark.parametrize(
    ("policy", "nth"), most([("raise", 1), ("raise", 3), ("lossy", 2)], product(["raise", "lossy"], [1, 2, 3]))
)
@pytest.mark.parametrize(
    "operation", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather"]
)
@pytest.mark.sample(6)
def test_the_kernel_refuses(ranks: Ranks, operation: str, nth: int, policy: str) -> None:
    """What was being read comes in frames, and so does all that follows."""

    def run(comm: Comm, _: Context) -> bool:
        for _turn in range(nth + 1):
            exchange(comm, operation)
        return bool(comm.stats()["reads_refused"])

    faults = f"rank=1,at=shm.read:{nth},do=corrupt"
    for result in ranks.start(3, run, faults=faults, policy=policy).results():
        assert result.ok, result.text()
        assert result.value is True


def test_the_kernel_refuses_those_that_can_be_replayed(ranks: Ranks) -> None:
    """Frames would give other bits: everybody gets an error that says what to do, and what needs no reading works."""

    def run(comm: Comm, _: Context) -> str:
        with pytest.raises(ftcomm.SystemFailure) as caught:
            comm.all_reduce(np.ones(100_000))
        small = np.ones(10)
        comm.all_reduce(small)
        assert small[0] == 3
        return str(caught.value)

    # All of them: a final that has been logged comes from there if it can't be read, and rank 1 may fetch such ones first.
    faults = ";".join(f"rank=1,at=shm.read:{nth},do=corrupt" for nth in range(1, 41))
    for result in ranks.start(3, run, faults=faults, policy="replay").results():
        assert result.ok, result.text()
        assert "FTCOMM_PEER_MEMORY=0" in result.value


@pytest.mark.parametrize(
    ("victim", "point"),
    [(0, "vote.plan"), (0, "decide.after")]
    + [(victim, point) for victim in range(3) for point in ("decide.apply", "repair.start", "repair.done")],
)
@pytest.mark.sample(4)
def test_killed_after_the_kernel_has_refused(ranks: Ranks, victim: int, point: str) -> None:
    """Whoever is left has the sum over those that the outcome names."""

    def run(comm: Comm, _: Context) -> None:
        for _turn in range(3):
            data = whole(comm.rank, 100_000, np.float32)
            for offset, count, who in comm.all_reduce(data).chunks:
                total = sum(whole(r, 100_000, np.float32) for r in who)
                expect(data[offset : offset + count], total[offset : offset + count])

    faults = f"rank=1,at=shm.read:2,do=corrupt;rank={victim},at={point},do=kill"
    ranks(3, run, faults=faults, policy="lossy", dies=[victim])


def test_one_rank_does_not_take_part(ranks: Ranks) -> None:
    def start(group: Group, context: Context) -> float:
        os.environ["FTCOMM_PEER_MEMORY"] = "0" if context.rank == 1 else "1"
        comm = ftcomm.init(context.rank, group.size, store=group.store(), job=group.job, options=group.options)
        data = np.full(100_000, comm.rank + 1.0)
        comm.all_reduce(data)
        comm.leave()
        return float(data[0])

    assert [r.value for r in ranks.start(3, start, direct=False).results()] == [6.0] * 3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("point", ["shm.read:3", "shm.read:13", "pull.ready", "pull.final:2"])
def test_a_late_reader_takes_nothing_of_what_comes_after(ranks: Ranks, size: int, point: str) -> None:
    """C9: a rank stops in the middle of it, is voted out, and wakes up when the others' buffers hold other things.

    The 13th read is the last of 25 segments on two ranks, two at a time: after it the other's fence frame, which is there
    already, would be all that the late rank needs to return.
    """

    def run(comm: Comm, context: Context) -> str:
        data = np.ones(400_000, np.float32)
        try:
            outcome = comm.all_reduce(data)
            for offset, count, who in outcome.chunks:
                assert (data[offset : offset + count] == len(who)).all(), outcome.chunks
            data.fill(-1)  # the caller's again
            if comm.rank != 1:
                context.mark("filled")
                context.hold()
            comm.barrier()
        except ftcomm.StaleEpoch:
            return "stale"
        finally:
            context.mark("returned")
        return "ok"

    group = ranks.start(size, run, policy="lossy", heartbeat=0.5, faults=f"rank=1,at={point},do=stop:60")
    group.wake_late(1, {0, size - 1} - {1})
    values = [result.value if result.ok else result.text() for result in group.results()]
    assert values == ["ok", "stale", "ok"][:size]


def test_parts_of_every_size(ranks: Ranks) -> None:
    """Each pair decides for itself: nothing, what goes through the ring, and what is read, several pieces of it."""

    def run(comm: Comm, _: Context) -> None:
        me, n = comm.rank, comm.size
        counts = [[(0, 3, 5_000, 700_000)[(r + s) % 4] for r in range(n)] for s in range(n)]  # [from][to]
        for _turn in range(3):
            sent = np.concatenate([whole(me * n + r, counts[me][r], np.float32) for r in range(n)])
            got = np.full(sum(counts[s][me] for s in range(n)), -1, np.float32)
            comm.all_to_all(got, sent, out_counts=[counts[s][me] for s in range(n)], in_counts=counts[me])
            want = np.concatenate([whole(s * n + me, counts[s][me], np.float32) for s in range(n)])
            expect(got, want)

    for result in ranks.start(4, run).results():
        assert result.ok, result.text()


def test_counts_that_differ_are_an_error(ranks: Ranks) -> None:
    def run(comm: Comm, _: Context) -> str:
        data = np.ones(200_000, np.float32)
        counts = [100_000, 100_000] if comm.rank == 0 else [99_999, 100_001]
        try:
            comm.all_to_all(np.zeros(200_000, np.float32), data, out_counts=counts, in_counts=[100_000] * 2)
        except ftcomm.Mismatch as error:
            return str(error)
        return "none"

    for result in ranks.start(2, run).results():
        assert result.ok, result.text()
        assert "all_to_all" in result.value


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", ["direct.enter", "direct.show", "direct.read", "direct.read:2"])
@pytest.mark.sample(4)
def test_a_death_in_it(ranks: Ranks, point: str, victim: int) -> None:
    """The parts of the dead can't be had: an error for all, and the next one is whole among those who live."""

    def run(comm: Comm, _: Context) -> str:
        text = "complete"
        try:
            comm.all_to_all(np.zeros(PARTS, np.float32), np.full(PARTS, comm.rank, np.float32))
        except ftcomm.PeerFailure as error:
            text = str(error)
        comm = comm.shrink()
        got = np.zeros(PARTS // 3 * 2, np.float32)
        comm.all_to_all(got, np.full(PARTS // 3 * 2, comm.rank + 1, np.float32))
        expect(got, np.repeat(np.float32([1, 2]), PARTS // 3))
        return text

    results = ranks.start(3, run, faults=f"rank={victim},at={point},do=kill").results()
    texts = {result.value for rank, result in enumerate(results) if rank != victim}
    assert len(texts) == 1, texts
    assert f"{victim}" in texts.pop()


@pytest.mark.parametrize(
    ("size", "point"), [(2, "shm.read:3"), (2, "direct.enter"), (3, "shm.read:4"), (3, "direct.read:2")]
)
def test_a_late_reader_of_another_ranks_part(ranks: Ranks, size: int, point: str) -> None:
    """C9: it stops in the middle of it, is voted out, and finds other things there when it wakes up.

    The third read is the last with two ranks. After it the other's fence frame, which is there already, would be all that the
    late rank needs to return: nothing but the ticket keeps it from that.
    """

    def run(comm: Comm, context: Context) -> str:
        data, got = np.full(PARTS, comm.rank, np.float32), np.zeros(PARTS, np.float32)
        try:
            comm.all_to_all(got, data)
            assert [set(part) for part in got.reshape(size, -1)] == [{r} for r in range(size)], got
        except ftcomm.StaleEpoch:
            return "stale"
        except ftcomm.PeerFailure:
            data.fill(-1)  # the caller's again
            if comm.rank != 1:
                context.mark("filled")
                context.hold()
            return "failed"
        finally:
            context.mark("returned")
        return "ok"

    group = ranks.start(size, run, policy="lossy", heartbeat=0.5, faults=f"rank=1,at={point},do=stop:60")
    group.wake_late(1, {0, size - 1} - {1})
    values = [result.value if result.ok else result.text() for result in group.results()]
    assert values == ["failed", "stale", "failed"][:size]
