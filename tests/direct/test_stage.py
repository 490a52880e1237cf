"""Ranks of one host that share its processors: what is large goes by windows of shared memory, a chunk at a time."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from collective_values import every_collective, expect, those_left_have_the_same_sum, whole
from harness import Context, Ranks
from kill_table import points
from processors import on_one_processor

import ftcomm

Comm = ftcomm.Communicator
STAGE = points("stage.")


@pytest.fixture(autouse=True)
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FTCOMM_STAGE_LIMIT", "0")
    with on_one_processor():
        yield


@pytest.mark.parametrize("stream", ["0", str(1 << 40)])
@pytest.mark.parametrize("size", [3, 4, 7])
@pytest.mark.sample(3)
def test_every_collective(ranks: Ranks, size: int, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written past the caches where that is faster, and not; with chunks of one piece, of several, and the rest of one."""
    monkeypatch.setenv("FTCOMM_STREAM_LIMIT", stream)
    ranks(size, lambda comm: every_collective(comm, (16_385, 60_001, 400_000)))


def test_averages_of_narrow_numbers_are_rounded_once(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        inputs = [
            np.random.default_rng(r).standard_normal(300_001).astype(ml_dtypes.bfloat16) for r in range(comm.size)
        ]
        data = inputs[comm.rank].copy()
        comm.all_reduce(data, "avg")
        total = np.zeros(data.size, np.float32)
        for one in inputs:
            total = total + one.astype(np.float32)
        expect(data, (total / np.float32(comm.size)).astype(ml_dtypes.bfloat16))

    ranks(5, run)


def test_two_at_once_have_windows_of_their_own(ranks: Ranks) -> None:
    """One communicator's operation goes on while another's waits for a rank."""

    def run(comm: Comm) -> None:
        other = comm.dup()
        for turn in range(4):
            a, b = whole(comm.rank, 150_000, np.float64), whole(comm.rank + 1, 150_000, np.float64)
            first = (comm if (comm.rank + turn) % 2 else other).iall_reduce(a if (comm.rank + turn) % 2 else b)
            second = (other if (comm.rank + turn) % 2 else comm).iall_reduce(b if (comm.rank + turn) % 2 else a)
            first.wait()
            second.wait()
            expect(a, sum(whole(r, 150_000, np.float64) for r in range(comm.size)))
            expect(b, sum(whole(r + 1, 150_000, np.float64) for r in range(comm.size)))

    ranks(4, run)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", [*STAGE, "stage.step:2", "stage.final:7", "fence.before"])
@pytest.mark.sample(6)
def test_a_death(ranks: Ranks, point: str, victim: int) -> None:
    those_left_have_the_same_sum(ranks, 5, 700_000, victim, point)


@pytest.mark.parametrize("point", ["stage.input:5", "stage.reduce:2", "stage.final:9"])
def test_a_death_under_raise(ranks: Ranks, point: str) -> None:
    """Who has an error knows who died, and those who are left go on."""

    def run(comm: Comm) -> float:
        data = np.full(500_000, comm.rank + 1, np.float32)
        with pytest.raises(ftcomm.PeerFailure) as error:
            comm.all_reduce(data)
        assert error.value.ranks == (1,)
        left = comm.shrink()
        for _turn in range(2):
            data = np.full(500_000, comm.rank + 1, np.float32)
            left.all_reduce(data)
            assert (data == data[0]).all()
        return float(data[0])

    results = ranks(4, run, dies=[1], faults=f"rank=1,at={point},do=kill")
    assert [results[r] for r in (0, 2, 3)] == [8.0] * 3


@pytest.mark.parametrize("point", ["stage.reduce:2", "stage.final:3", "stage.final:11", "stage.step:2"])
def test_a_late_rank_takes_nothing_of_what_comes_after(ranks: Ranks, point: str) -> None:
    """C9: it stops in the middle, is voted out, and wakes up when other things are in the others' windows."""

    def run(comm: Comm, context: Context) -> str:
        data = np.ones(400_000, np.float32)
        try:
            for offset, count, who in comm.all_reduce(data).chunks:
                assert (data[offset : offset + count] == len(who)).all()
            other = np.full(400_000, 7, np.float32)
            comm.all_reduce(other)
            if comm.rank != 1:
                context.mark("filled")
                context.hold()
            comm.barrier()
        except ftcomm.StaleEpoch:
            assert set(np.unique(data)) <= {1.0, 5.0}  # its input, or what the sum was to be
            return "stale"
        finally:
            context.mark("returned")
        return "ok"

    group = ranks.start(5, run, policy="lossy", heartbeat=0.5, faults=f"rank=1,at={point},do=stop:60")
    group.wake_late(1, {0, 2, 3, 4})
    values = [result.value if result.ok else result.text() for result in group.results()]
    assert values == ["ok", "stale", "ok", "ok", "ok"]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", ["stage.enter", "stage.final", "stage.final:3", "stage.step:2", "fence.before"])
@pytest.mark.sample(4)
def test_a_death_in_a_broadcast(ranks: Ranks, point: str, victim: int) -> None:
    """Of who is told, and of a root that shows the second chunk while others copy the first one."""

    def run(comm: Comm) -> bool:
        data = whole(comm.rank, 300_000, np.float32)
        try:
            comm.broadcast(data)
        except ftcomm.PeerFailure as error:
            assert error.ranks == (victim,) == (0,)
            return False
        expect(data, whole(0, 300_000, np.float32))
        return True

    point = point.replace("stage.final", "stage.input") if victim == 0 else point
    results = ranks(5, run, policy="lossy", dies=[victim], faults=f"rank={victim},at={point},do=kill")
    left = [result for rank, result in enumerate(results) if rank != victim]
    assert left == [left[0]] * 4
    assert left[0] or victim == 0


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", ["stage.enter", "stage.input:2", "stage.final:6", "stage.step:2", "fence.before"])
@pytest.mark.sample(4)
def test_a_death_in_an_all_gather(ranks: Ranks, point: str, victim: int) -> None:
    def run(comm: Comm) -> tuple[int, ...]:
        mine, out = whole(comm.rank, 100_000, np.float32), np.zeros((comm.size, 100_000), np.float32)
        try:
            there = comm.all_gather(out, mine).contributors
        except ftcomm.PeerFailure as error:
            assert error.ranks == (victim,)
            return ()
        for rank in there:
            expect(out[rank], whole(rank, 100_000, np.float32))
        assert not out[[rank for rank in range(comm.size) if rank not in there]].any()
        return there

    results = ranks(5, run, policy="lossy", dies=[victim], faults=f"rank={victim},at={point},do=kill")
    left = [result for rank, result in enumerate(results) if rank != victim]
    assert left == [left[0]] * 4


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_reduce_scatter_in_place(ranks: Ranks, op: str) -> None:
    """Each rank's part of the result goes over that part of its input, which is added as well."""

    def run(comm: Comm) -> None:
        inputs = [whole(r, comm.size * 50_001, np.float64) for r in range(comm.size)]
        data, mine = inputs[comm.rank].copy(), slice(comm.rank * 50_001, (comm.rank + 1) * 50_001)
        comm.reduce_scatter(data[mine], data, op)
        total = np.max(inputs, axis=0) if op == "max" else sum(inputs) / (comm.size if op == "avg" else 1)
        expect(data[mine], total[mine])
        data[mine] = inputs[comm.rank][mine]
        expect(data, inputs[comm.rank])

    ranks(4, run)


@pytest.mark.parametrize("point", ["stage.enter", "stage.input:5", "stage.reduce:2", "stage.step:2", "fence.before"])
def test_a_death_in_a_reduce_scatter(ranks: Ranks, point: str) -> None:
    """Each part of a block is the sum over those that the outcome names."""

    def run(comm: Comm) -> int:
        data, out = np.arange(comm.size * 70_000.0) * (comm.rank + 1), np.zeros(70_000)
        part, parts = np.arange(70_000.0) + 70_000 * comm.rank, comm.reduce_scatter(out, data).chunks
        for at, n, who in parts:
            assert set(who) >= {0, 2, 3}
            expect(out[at : at + n], part[at : at + n] * sum(rank + 1 for rank in who))
        return sum(n for _at, n, _who in parts)

    results = ranks(4, run, policy="lossy", dies=[1], faults=f"rank=1,at={point},do=kill")
    assert [results[r] for r in (0, 2, 3)] == [70_000] * 3


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", ["stage.enter", "stage.input:2", "stage.reduce", "stage.step:2", "fence.before"])
@pytest.mark.sample(4)
def test_a_death_in_a_reduce(ranks: Ranks, point: str, victim: int) -> None:
    """Of a rank that the root adds, and of the root, without which it fails on all others."""

    def run(comm: Comm) -> bool:
        data = np.arange(100_000.0) * (comm.rank + 1)
        try:
            parts = comm.reduce(data, root=2).chunks
        except ftcomm.PeerFailure as error:
            assert error.ranks == (victim,) == (2,)
            return False
        for at, n, who in parts if comm.rank == 2 else ():
            expect(data[at : at + n], np.arange(at, at + n) * float(sum(r + 1 for r in who)))
        if comm.rank != 2:
            expect(data, np.arange(100_000.0) * (comm.rank + 1))
        return True

    point = "stage.reduce" if point == "stage.input:2" and victim == 2 else point  # the root puts nothing there
    point = "stage.input" if point == "stage.reduce" and victim == 0 else point
    results = ranks(5, run, policy="lossy", dies=[victim], faults=f"rank={victim},at={point},do=kill")
    left = [result for rank, result in enumerate(results) if rank != victim]
    assert left == [left[0]] * 4
    assert left[0] or victim == 2


@pytest.mark.parametrize("point", ["stage.enter", "stage.input:2", "stage.final:2", "fence.before"])
def test_a_death_in_an_all_to_all(ranks: Ranks, point: str) -> None:
    """Who dies before the others have called it may be out of the job by then: it has no part in theirs."""

    def run(comm: Comm) -> str:
        count = 200_000 // comm.size // 4
        data = np.stack([whole(10 * comm.rank + to, count, np.float32) for to in range(comm.size)])
        out = np.zeros_like(data)
        try:
            comm.all_to_all(out, data)
        except ftcomm.PeerFailure as error:
            assert error.ranks == (1,)
            return "failed"
        without = point in ("stage.enter", "stage.input:2") and not out[1].any()
        expected = np.stack([whole(10 * r + comm.rank, count, np.float32) for r in range(comm.size)])
        if without:
            expected[1] = 0
        expect(out, expected)
        return "without" if without else "done"

    results = ranks(4, run, policy="lossy", dies=[1], faults=f"rank=1,at={point},do=kill")
    left = [results[r] for r in (0, 2, 3)]
    assert left == [left[0]] * 3


def test_some_give_counts(ranks: Ranks) -> None:
    """As large as goes by windows without them: then all parts go from rank to rank."""

    def run(comm: Comm) -> None:
        count = 50_000
        data = np.stack([whole(10 * comm.rank + to, count, np.float32) for to in range(comm.size)])
        for turn in range(4):
            out = np.zeros_like(data)
            counts = [count] * comm.size if (comm.rank + turn) % 3 == 0 else None
            comm.all_to_all(out, data, in_counts=counts, out_counts=counts)
            expect(out, [whole(10 * r + comm.rank, count, np.float32) for r in range(comm.size)])

    ranks(4, run)


@pytest.mark.parametrize("reduces_first", [True, False])
def test_without_room_for_a_window_it_is_done_without(ranks: Ranks, reduces_first: bool) -> None:
    def run(comm: Comm) -> None:
        for turn in range(6):
            data = whole(comm.rank, 300_000, np.float32)
            if turn % 2 == reduces_first:
                comm.broadcast(data, root=2)
                expect(data, whole(2, 300_000, np.float32))
            else:
                comm.all_reduce(data)
                expect(data, sum(whole(r, 300_000, np.float32) for r in range(comm.size)))
        assert comm.stats()["lacks_windows"]
        assert not comm.stats()["reads_refused"]

    ranks(4, run, faults="rank=2,at=shm.window,do=corrupt")


def test_many_at_once_leave_room_in_a_small_segment(ranks: Ranks) -> None:
    """Links and votes need some of it, too: else nobody could say that there is no window."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 20, before[1]))  # what a segment is at least

    def run(comm: Comm) -> None:
        comms = [comm.dup() for _ in range(25)]
        data = [np.ones(100_000, np.float32) for _ in comms]
        order = range(25) if comm.rank % 2 else range(24, -1, -1)
        requests = [comms[i].iall_reduce(data[i]) for i in order]
        for request in requests:
            request.wait()
        assert all((one == comm.size).all() for one in data)

    try:
        ranks(8, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_may_not_be_read_is_not_needed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOMM_PEER_MEMORY", "0")

    def run(comm: Comm) -> None:
        data = whole(comm.rank, 300_000, np.float32)
        comm.all_reduce(data)
        expect(data, sum(whole(r, 300_000, np.float32) for r in range(comm.size)))

    ranks(4, run)
