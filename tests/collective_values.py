"""Collectives whose results are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

import ftcomm


def whole(rank: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Small whole numbers: their sums are exact in every type."""
    return ((np.arange(count) * 7 + rank * 3) % 5).astype(dtype)


def every_collective(comm: ftcomm.Communicator, counts: Iterable[int]) -> None:
    """Each one, of so many elements, compared with what it has to give."""
    me, n = comm.rank, comm.size
    for count in counts:
        for dtype in (np.float32, np.float64, np.int8, np.int64, np.complex64, ml_dtypes.bfloat16):
            total = sum(whole(r, count, np.float64) for r in range(n))
            data = whole(me, count, dtype)
            comm.all_reduce(data)
            np.testing.assert_array_equal(data.astype(np.complex128), total)
        average = whole(me, count, np.float32)
        comm.all_reduce(average, "avg")
        np.testing.assert_array_equal(average, (total / n).astype(np.float32))
        told = whole(me, count, np.int32)
        comm.broadcast(told, n - 1)
        np.testing.assert_array_equal(told, whole(n - 1, count, np.int32))
        gathered = np.zeros((n, count), np.float32)
        comm.all_gather(gathered.reshape(-1), whole(me, count, np.float32))
        for r in range(n):
            np.testing.assert_array_equal(gathered[r], whole(r, count, np.float32))
        part = np.zeros(count, np.float64)
        comm.reduce_scatter(part, np.concatenate([whole(me + r, count, np.float64) for r in range(n)]))
        np.testing.assert_array_equal(part, sum(whole(me + r, count, np.float64) for r in range(n)))
        exchanged = np.zeros(n * count, np.int32)
        comm.all_to_all(exchanged, np.concatenate([whole(me + 2 * r, count, np.int32) for r in range(n)]))
        np.testing.assert_array_equal(exchanged, np.concatenate([whole(r + 2 * me, count, np.int32) for r in range(n)]))
        collected = np.zeros(n * count, np.float32) if me == n - 1 else None
        comm.gather(whole(me, count, np.float32), collected, n - 1)
        if collected is not None:
            np.testing.assert_array_equal(collected, np.concatenate([whole(r, count, np.float32) for r in range(n)]))
        dealt = np.zeros(count, np.float32)
        comm.scatter(dealt, np.concatenate([whole(r, count, np.float32) for r in range(n)]) if me == 0 else None)
        np.testing.assert_array_equal(dealt, whole(me, count, np.float32))
        at_root = whole(me, count, np.float64)
        comm.reduce(at_root, 0)
        np.testing.assert_array_equal(at_root, total if me == 0 else whole(me, count, np.float64))
