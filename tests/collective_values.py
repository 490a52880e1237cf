"""Collectives whose results are known."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from harness import Ranks

import ftcomm


def whole(rank: int, count: int, dtype: Any, least: int = 0) -> np.ndarray[Any, Any]:
    """Small whole numbers: their sums are exact in every type. Each rank's begin elsewhere in the same ones."""
    return _numbers(count, dtype, least)[4 * rank % 5 :][:count].copy()


@lru_cache(maxsize=8)
def _numbers(count: int, dtype: Any, least: int) -> np.ndarray[Any, Any]:
    return (np.arange(count + 4) * 7 % 5 + least).astype(dtype)


def expect(found: Any, wanted: Any) -> None:
    """NumPy's own assertion looks at all elements several times."""
    if not np.array_equal(found, wanted):
        np.testing.assert_array_equal(found, wanted)


def different(values: np.ndarray[Any, Any]) -> list[float]:
    """Those that there are, in order."""
    return [float(x) for x in np.unique(values)]


def every_collective(comm: ftcomm.Communicator, counts: Iterable[int]) -> None:
    """Each one, of so many elements, compared with what it has to give."""
    me, n = comm.rank, comm.size
    for count in counts:
        for dtype in (np.float32, np.float64, np.int8, np.int64, np.complex64, ml_dtypes.bfloat16):
            total = sum(whole(r, count, np.float64) for r in range(n))
            data = whole(me, count, dtype)
            comm.all_reduce(data)
            expect(data, total.astype(dtype))
        average = whole(me, count, np.float32)
        comm.all_reduce(average, "avg")
        expect(average, (total / n).astype(np.float32))
        mine = whole(me, count, np.float32)
        comm.reduce(mine, n - 1)
        expect(mine, total.astype(np.float32) if me == n - 1 else whole(me, count, np.float32))
        told = whole(me, count, np.int32)
        comm.broadcast(told, n - 1)
        expect(told, whole(n - 1, count, np.int32))
        gathered = np.zeros((n, count), np.float32)
        comm.all_gather(gathered.reshape(-1), whole(me, count, np.float32))
        for r in range(n):
            expect(gathered[r], whole(r, count, np.float32))
        part = np.zeros(count, np.float64)
        comm.reduce_scatter(part, np.concatenate([whole(me + r, count, np.float64) for r in range(n)]))
        expect(part, sum(whole(me + r, count, np.float64) for r in range(n)))
        exchanged = np.zeros(n * count, np.int32)
        comm.all_to_all(exchanged, np.concatenate([whole(me + 2 * r, count, np.int32) for r in range(n)]))
        expect(exchanged, np.concatenate([whole(r + 2 * me, count, np.int32) for r in range(n)]))
        collected = np.zeros(n * count, np.float32) if me == n - 1 else None
        comm.gather(whole(me, count, np.float32), collected, n - 1)
        if collected is not None:
            expect(collected, np.concatenate([whole(r, count, np.float32) for r in range(n)]))
        dealt = np.zeros(count, np.float32)
        comm.scatter(dealt, np.concatenate([whole(r, count, np.float32) for r in range(n)]) if me == 0 else None)
        expect(dealt, whole(me, count, np.float32))
        at_root = whole(me, count, np.float64)
        comm.reduce(at_root, 0)
        expect(at_root, total if me == 0 else whole(me, count, np.float64))


def those_left_have_the_same_sum(ranks: Ranks, size: int, count: int, victim: int, point: str) -> None:
    """One is killed in an all-reduce: each part of it is the sum over those that the outcome names."""

    def run(comm: ftcomm.Communicator) -> list[tuple[tuple[int, ...], list[float]]]:
        data = np.full(count, 1.0 + comm.rank, np.float32)
        parts = comm.all_reduce(data).chunks
        return [(who, different(data[at : at + n])) for at, n, who in parts]

    results = ranks(size, run, policy="lossy", dies=[victim], faults=f"rank={victim},at={point},do=kill")
    left = [parts for rank, parts in enumerate(results) if rank != victim]
    assert left == [left[0]] * (size - 1)
    for who, values in left[0]:
        assert values == [float(sum(1 + rank for rank in who))]
