"""Ranks of one host whose links are written past the caches: values and deaths. (What is read then: test_tune.py.)"""

from __future__ import annotations

import numpy as np
import pytest
from collective_values import different, every_collective, expect, those_left_have_the_same_sum, whole
from harness import Ranks

import ftcomm

Comm = ftcomm.Communicator


@pytest.fixture(params=["4096", "16384"], autouse=True)
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOMM_STREAM_LIMIT", request.param)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.sample(3)
def test_every_collective(ranks: Ranks, size: int) -> None:
    def run(comm: Comm) -> bool:
        every_collective(comm, (1_023, 4_099, 20_001, 300_007))
        return bool(comm.stats()["streams"])

    assert ranks(size, run) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sample(2)
def test_every_collective_as_by_default(ranks: Ranks, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the caches or not, as each rank measures while it runs (on AMD's processors)."""
    monkeypatch.setenv("FTCOMM_STREAM_LIMIT", "0")

    def run(comm: Comm) -> None:
        for _ in range(3):
            every_collective(comm, (4_099, 20_001, 300_007))

    ranks(size, run)


@pytest.mark.parametrize(("size", "count"), [(2, 120_000), (2, 4_200_000), (3, 4_200_000)])
@pytest.mark.sample(2)
def test_an_average_of_large_halves_is_finite(ranks: Ranks, size: int, count: int) -> None:
    def run(comm: Comm) -> list[list[float]]:
        whole_one, part = np.full(count, 60_000, np.float16), np.empty(count // size, np.float16)
        comm.all_reduce(whole_one, "avg")
        comm.reduce_scatter(part, np.full(count, 60_000, np.float16), "avg")
        return [different(found) for found in (whole_one, part)]

    assert ranks(size, run) == [[[60_000.0], [60_000.0]]] * size


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_messages_of_every_size(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm) -> None:
        for count in (1, 4_095, 4_096, 4_097, 16_383, 16_385, 65_537, 1_000_001, 9_000_003):
            mine, theirs = (whole(rank, count, np.uint8) for rank in (comm.rank, 1 - comm.rank))
            got = np.empty_like(mine)
            sending = comm.isend(mine, 1 - comm.rank)
            comm.recv(got, 1 - comm.rank)
            sending.wait()
            expect(got, theirs)

    ranks(2, run, transport=transport)


@pytest.mark.parametrize(
    "point", ["ring.rs.first:5", "ring.rs.owner:9", "ring.ag.hop:7", "ring.ag.final", "ring.rs.hop:3"]
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sample(8)
def test_a_death_in_a_large_sum(ranks: Ranks, point: str, size: int) -> None:
    if size == 2 and ".hop" in point:
        pytest.skip("two ranks have no rank in between")
    those_left_have_the_same_sum(ranks, size, 2_000_003, 1, point)


@pytest.mark.parametrize("point", ["pull.enter:9", "pull.final:7", "collective.part:9", "fence.before:8"])
def test_a_death_in_what_two_ranks_push(ranks: Ranks, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by default: on AMD's processors by the link while that is quick, else by reading."""
    monkeypatch.setenv("FTCOMM_STREAM_LIMIT", "0")
    count = 40_000

    def run(comm: Comm) -> list[list[float]]:
        mine, all_of_it = np.full(count, 1.0 + comm.rank, np.float32), np.empty(2 * count, np.float32)
        found = []
        for _ in range(12):
            all_of_it[:] = -1
            try:
                parts = comm.all_gather(all_of_it, mine).chunks
            except ftcomm.PeerFailure:  # in the one that needs what only the dead rank had
                found.append([1.0])
                continue
            for at, n, who in parts:
                if who:
                    found.append(different(all_of_it[at : at + n] - at // count))
        return found

    results = ranks(2, run, policy="lossy", dies=[1], faults=f"rank=1,at={point},do=kill")
    assert len(results[0]) >= 12
    assert results[0] == [[1.0]] * len(results[0])
