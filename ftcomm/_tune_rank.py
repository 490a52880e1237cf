"""One rank of ``ftcomm tune``: ``python -m ftcomm._tune_rank PLAN``, with what to measure as JSON."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ftcomm
from ftcomm.errors import Error, InternalError
from ftcomm.stores.file import FileStore
from ftcomm.tune import FLAT, READING

START_TIMEOUT = 60.0  # seconds


def _start(plan: Mapping[str, Any]) -> Any:
    """What the environment says of transports and memory stays, as it does so for the jobs that are tuned."""
    os.environ[READING.variable] = "1"  # what "auto" does with the larger sizes is reading
    os.environ["FTCOMM_STAGE_LIMIT"] = str(1 << 40)  # and not to go by windows, which no border is of
    folder = Path(plan["folder"])
    return ftcomm.init(
        plan["rank"],
        plan["ranks"],
        options=ftcomm.Options(policy="raise", log="all", events=None),
        store=FileStore(str(folder / "store")),
        job=folder.name,
        incarnation=0,
        timeout=START_TIMEOUT,
    )


def _main(plan: Mapping[str, Any]) -> None:
    """Measures; rank 0 tells each result as a line of JSON."""

    def tell(**what: Any) -> None:
        if comm.rank == 0:
            print(json.dumps(what), flush=True)

    comm = _start(plan)
    info = comm.stats()
    tell(streams=info["streams"], crowded=info["crowded"], max_payload=info["max_payload"])
    reads = np.array([len(info["peer_memory"]) == comm.size - 1], np.int32)
    comm.all_reduce(reads, "min")
    if not reads[0]:
        tell(not_read="the ranks can't read each other's memory here (FTCOMM_PEER_MEMORY, transport)")
    for size in sorted(plan["sizes"]):
        comparison = FLAT if size <= info["max_payload"] else READING
        if comparison is READING and not reads[0]:
            continue
        times = _measure(comm, size, comparison.algorithms, plan["rounds"])
        if comm.stats()["reads_refused"]:  # on all ranks; from that call on the two algorithms were the same
            reads[0] = 0
            tell(not_read="the kernel refused it, though it had seemed to allow it: set FTCOMM_PEER_MEMORY=0")
            if comparison is READING:
                continue
        tell(variable=comparison.variable, bytes=size, seconds=dict(zip(comparison.algorithms, times, strict=True)))
    comm.leave()


def _measure(comm: Any, size: int, algorithms: Sequence[str], rounds: int) -> list[float]:
    """Seconds per call of each algorithm: the median over rounds of the slowest rank's mean."""
    data = np.zeros(size // 4, np.float32)
    for name in algorithms:
        data.fill(1)
        comm.all_reduce(data, "sum", name)
        if not (data == comm.size).all():
            raise InternalError(f"An all-reduce of {size} bytes with algorithm={name!r} gave a wrong sum.")
    data.fill(0)  # ones would grow to infinity
    calls = max(2, min(200, (32 << 20) // size))
    means = np.zeros((rounds + 1, len(algorithms)))
    lot = random.Random(size)  # the same on all ranks
    for row in means:
        for i in lot.sample(range(len(algorithms)), len(algorithms)):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                comm.all_reduce(data, "sum", algorithms[i])
            row[i] = (time.perf_counter() - start) / calls
    comm.all_reduce(means, "max")
    return [statistics.median(column) for column in means[1:].T.tolist()]  # the first round warms caches up


if __name__ == "__main__":
    try:
        _main(json.loads(sys.argv[1]))
    except Error as error:
        sys.exit(str(error))
