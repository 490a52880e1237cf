"""The all-reduce that is a chain of logged messages. Kills in it are part of programs.everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks

import ftcomm


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_sums(ranks: Ranks, transport: str, size: int) -> None:
    def run(comm: Any) -> bytes:
        out = b""
        for count in (0, 1, comm.size - 1, comm.size + 1, 1000, 70_001, 300_001):  # the last past the caches
            whole = np.arange(count, dtype=np.int64) * (comm.rank + 1)
            comm.all_reduce(whole, algorithm="ring-logged")
            np.testing.assert_array_equal(whole, np.arange(count) * (comm.size * (comm.size + 1) // 2))
            mean = np.full(count, float(comm.rank + 1))
            comm.all_reduce(mean, "avg", algorithm="ring-logged")
            np.testing.assert_array_equal(mean, np.full(count, (comm.size + 1) / 2))
            scaled = np.full(count, float(comm.rank + 1))
            comm.all_reduce(scaled, "premul_sum", factor=0.5, algorithm="ring-logged")
            np.testing.assert_array_equal(scaled, np.full(count, comm.size * (comm.size + 1) / 4))
            rough = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float16)
            comm.all_reduce(rough, algorithm="ring-logged")
            out += rough.tobytes()
        return out

    values = ranks(size, run, policy="replay", transport=transport)
    assert len(set(values)) == 1, "not the same bits on every rank"


def test_an_average_of_large_halves_is_finite(ranks: Ranks) -> None:
    def run(comm: Any) -> set[float]:
        mean = np.full(300_001, 60_000, np.float16)
        comm.all_reduce(mean, "avg", algorithm="ring-logged")
        return {float(x) for x in mean}

    assert ranks(2, run, policy="replay") == [{60_000.0}] * 2


def test_several_at_once_keep_their_order(ranks: Ranks) -> None:
    def run(comm: Any) -> None:
        buffers = [np.full(5000, float(comm.rank + i)) for i in range(6)]
        requests = [comm.iall_reduce(b, algorithm="ring-logged" if i % 2 else "auto") for i, b in enumerate(buffers)]
        for request in reversed(requests):
            request.wait()
        for i, b in enumerate(buffers):
            np.testing.assert_array_equal(b, np.full(5000, 3.0 + 3 * i))

    ranks(3, run, policy="replay", transport="shm")


def test_refusals(ranks: Ranks) -> None:
    def run(comm: Any) -> None:
        with pytest.raises(ftcomm.Unsupported, match="needs the policy replay"):
            comm.all_reduce(np.zeros(3), algorithm="ring-logged")

    ranks(2, run, policy="raise")


def unequal(counts: list[int], dtypes: list[str]) -> Callable[[Any], str]:
    def run(comm: Any) -> str:
        with pytest.raises(ftcomm.Mismatch) as told:
            comm.all_reduce(np.zeros(counts[comm.rank], dtypes[comm.rank]), algorithm="ring-logged")
        with pytest.raises(ftcomm.Mismatch):  # what is under way cannot be told from the next one's
            comm.all_reduce(np.zeros(4), algorithm="ring-logged")
        return str(told.value)

    return run


def are_refused(ranks: Ranks, counts: list[int]) -> None:
    for message in ranks(len(counts), unequal(counts, ["f8"] * len(counts)), policy="replay", transport="shm"):
        assert "ring-logged" in message
        assert "another number of elements" in message


# As one chunk, as chunks, and both; a chunk of one rank is as long as the sum of another. Each rank hears of it, also one
# whose neighbours agree with it.
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize(
    ("odd", "others"),
    [(10, 1000), (20_000, 10_000), (10, 10_000), (10_000, 10), (4096, 16_384), (16_384, 4096), (0, 10), (10, 0)],
)
@pytest.mark.sample(8)
def test_unequal_sizes(ranks: Ranks, odd: int, others: int, place: int) -> None:
    are_refused(ranks, [odd if rank == place else others for rank in range(4)])


# Two ranks exchange what is short, and pass on what is long.
@pytest.mark.parametrize("counts", [(10, 1000), (10, 10_000), (10_000, 10), (20_000, 10_000), (4096, 8192), (0, 10)])
def test_unequal_sizes_of_two(ranks: Ranks, counts: tuple[int, int]) -> None:
    are_refused(ranks, list(counts))


def test_unequal_types(ranks: Ranks) -> None:
    for message in ranks(3, unequal([100] * 3, ["f8", "f8", "i8"]), policy="replay", transport="shm"):
        assert "data type" in message


def test_no_checkpoint_after_a_failure(ranks: Ranks) -> None:
    """Who went on from it would not know of the failure, and would read what it has left under way."""

    def run(comm: Any) -> str:
        comm.resume()
        comm.commit_checkpoint("before")
        fresh = comm.dup()
        with pytest.raises(ftcomm.Mismatch):
            comm.all_reduce(np.zeros(100 + comm.rank), algorithm="ring-logged")
        with pytest.raises(ftcomm.Error) as told:
            comm.commit_checkpoint("after")
        fresh.all_reduce(np.zeros(100), algorithm="ring-logged")
        return str(told.value)

    for message in ranks(3, run, policy="replay", transport="shm"):
        assert "ring-logged all_reduce of this communicator has failed" in message


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("point", ["channel.receive:7", "channel.send.logged:9", "log.header.before:11"])
def test_kill_in_the_chain(keep: Any, point: str, size: int) -> None:
    def run(comm: Any, context: Context) -> list[float]:
        x = np.random.default_rng(comm.rank).standard_normal(3001).astype(np.float32)
        for _ in range(20):
            comm.all_reduce(x, "avg", algorithm="ring-logged")
            x += np.float32(comm.rank)
        return [float(v) for v in x]

    wanted = keep(size, run, transport="shm").values()
    job = keep(size, run, transport="shm", faults=f"rank=1.0,at={point},do=kill")
    assert job.values() == wanted
    assert job.deaths == [(1, 0)]
