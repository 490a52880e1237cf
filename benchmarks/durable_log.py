"""How many messages a second go into logs that survive the host (durability "host"), on a real disk, one by one and together.

    python benchmarks/durable_log.py [--folder /var/tmp] [--rounds 5] [--messages 200] [--sizes 64 4096 65536]

Two ranks on two pretended hosts, both with their logs in FOLDER. Rank 0 posts a batch of messages with isend, waits for all, and
flushes its log: "logged" is how many of them a second are on its disk then; "received" counts until rank 1 has received them
all, which syncs its own half of each. With log_mode "sync" each record is synced before the call returns, with "async" all that
wait are synced together. Medians over rounds; the modes take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from _ranks import run_ranks

import ftcomm

MODES = ("sync", "async")


def batch(comm: Any, count: int, size: int) -> tuple[float, float]:
    data, end = np.ones((count, size), np.uint8), np.zeros(1, np.uint8)
    comm.barrier()
    start = time.perf_counter()
    if comm.rank == 0:
        for request in [comm.isend(row, 1) for row in data]:
            request.wait()
        comm.log_flush()
        logged = time.perf_counter() - start
        comm.recv(end, 1)
        return count / logged, count / (time.perf_counter() - start)
    for row in data:
        comm.recv(row, 0)
    comm.send(end, 0)
    return 0.0, 0.0


def rank_main(args: argparse.Namespace) -> None:
    rank, folder = int(os.environ["RANK"]), os.environ["FOLDER"]
    comms = {}
    for mode in MODES:
        options = ftcomm.Options(
            policy="replay",
            transport="tcp",
            host=f"host-{rank}",
            durability="host",
            heartbeat=30.0,  # a disk may stall
            log_mode=mode,
            log_dir=f"{os.environ['LOGS']}/{mode}",
        )
        comms[mode] = ftcomm.init(rank, 2, f"file://{folder}/{mode}", options, job=f"durable-{mode}")
        comms[mode].resume()
    for size in args.sizes:
        found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for number in range(args.rounds + 1):
            for mode in MODES:
                found[mode].append(batch(comms[mode], args.messages, size))
                comms[mode].commit_checkpoint(f"{size} {number}")
        for mode in MODES if rank == 0 else ():
            logged, received = (statistics.median(values) for values in zip(*found[mode][1:], strict=True))
            print(f"{size:8} bytes  {mode:5}  logged {logged:10.0f}/s  received {received:10.0f}/s", flush=True)
    for comm in comms.values():
        comm.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/var/tmp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 4096, 65536])
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    with tempfile.TemporaryDirectory(prefix="ftcomm-durable-", dir=args.folder, ignore_cleanup_errors=True) as logs:
        run_ranks(2, LOGS=logs)


if __name__ == "__main__":
    main()
