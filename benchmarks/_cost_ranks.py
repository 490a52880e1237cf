"""A rank of fault_tolerance_cost.py: does what its driver says over a socket, and sleeps in a read between."""

from __future__ import annotations

import contextlib
import json
import os
import time
from multiprocessing.connection import Client
from typing import Any

import numpy as np


def main() -> None:
    plan: dict[str, Any] = json.loads(os.environ["COST"])
    rank, size = int(os.environ["RANK"]), int(plan["ranks"])
    driver = Client(plan["socket"], family="AF_UNIX")
    import ftcomm
    from ftcomm._lib import lib

    comm = ftcomm.init(
        rank, size, f"file://{plan['store']}", ftcomm.Options(policy="raise", transport=plan["transport"])
    )
    ffi, c = lib()
    driver.send((rank, ffi.string(c.ft_version()).decode()))
    work = np.zeros(0, np.float32)
    with contextlib.suppress(EOFError):  # the driver is gone
        while True:
            what, elements, calls = driver.recv()
            if what == "end":
                break
            if len(work) != elements:
                work = np.zeros(elements, np.float32)
            if what == "check":
                check(comm, work, plan["algorithm"])
                driver.send((rank, 0.0))
            else:
                driver.send((rank, timed(comm, work, calls, plan["algorithm"])))
    comm.leave()


def timed(comm: Any, work: np.ndarray, calls: int, algorithm: str) -> float:
    """Seconds of a call. Some come before: the other job had the caches."""
    for _ in range(1 + calls // 8):
        comm.all_reduce(work, "sum", algorithm)
    comm.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        comm.all_reduce(work, "sum", algorithm)
    return (time.perf_counter() - began) / calls


def check(comm: Any, work: np.ndarray, algorithm: str) -> None:
    """Values, with the buffer filled anew as soon as a call has returned: nobody may still need what was in it."""
    at = np.arange(len(work), dtype=np.float32) % 64
    results = []
    for turn in range(4):
        work[:] = at + (turn + comm.rank)
        comm.all_reduce(work, "sum", algorithm)
        results.append(work.copy())
    for turn, result in enumerate(results):
        want = comm.size * (at + turn) + sum(range(comm.size))
        if not np.array_equal(result, want):
            raise AssertionError(
                f"all-reduce {turn} of {len(work)} elements has given wrong values on rank {comm.rank}"
            )
    work[:] = 0  # sums of zeros do not grow from call to call


if __name__ == "__main__":
    main()
