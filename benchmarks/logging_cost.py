"""What logging costs when nothing fails: the policy replay against raise, all-reduce and messages, interleaved in one job each.

    python benchmarks/logging_cost.py [--ranks 4] [--rounds 9] [--transport shm] [--only send] [--sizes 1048576 ...] [--json FILE]
    python benchmarks/logging_cost.py --hosts --ranks 2 --only send     each rank pretends to be on a host of its own
    python benchmarks/logging_cost.py --rate 5G --ranks 2 --only send   two network namespaces, and a line that slow between them

Both jobs run in the same processes. For each size, rounds of the two take turns, each time in an order drawn by lot; a round is a
fixed number of calls; reported are the medians over rounds on rank 0 and their ratio (replay / raise). The log is in its
steady state: a checkpoint is committed between rounds, so that its segments are used again and again; "first" is the
first round, whose pages are fresh. "noise" is raise over raise: it is measured twice in every round, and where that is
not 1.00 the ratios beside it mean no more. With an all-reduce also the same as a chain of logged messages
(`algorithm="ring-logged"`), in rounds of its own, as it logs 2(n-1) times as much: over raise, and over the ring without a
log (`algorithm="ring"`, what Grover and Rajagopal compare with). Messages: rank 0 sends to rank 1, which answers each
batch with one byte; the buffers are as large as what is logged in a round, so that both policies stream through the same
amount of memory. Ranks of one host find a record in the sender's log, whatever the transport; those of different hosts (--hosts:
over tcp) are sent it, and keep a half of the log each. With --rate the two hosts are network namespaces, as those of
between_hosts.py, which says what they need.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _hosts_network import DEVICE, line, own_namespace
from _hosts_shape import Shape, rate
from _ranks import run_ranks

import ftcomm

REDUCE = [8, 1024, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20]
SEND = [64, 4096, 65536, 1 << 20, 16 << 20]
POLICIES = ("raise", "replay")
LOGGED = ("replay", "ring-logged")


def rounds(
    comms: dict[str, Any], works: dict[str, Callable[[Any], None]], number: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each work, and its first."""
    times: dict[str, list[float]] = {name: [] for name in works}
    order = random.Random(number)  # the same on every rank
    for _ in range(number + 1):
        # What came before matters: it leaves something in the caches.
        for name in order.sample(list(works), len(works)):
            work = works[name]
            comm = comms["replay" if name in LOGGED else "raise"]
            comm.barrier()
            start = time.perf_counter()
            work(comm)
            times[name].append(time.perf_counter() - start)
            if name in LOGGED:
                comm.commit_checkpoint(f"{name} {len(times[name])}")
    return {name: statistics.median(values[1:]) for name, values in times.items()}, {
        name: values[0] for name, values in times.items()
    }


def all_reduce(comms: dict[str, Any], size: int, number: int) -> tuple[dict[str, float], float, int]:
    calls = max(2, min(200, (32 << 20) // max(size, 1)))
    data = np.ones((calls, max(size // 4, 1)), np.float32)

    def work(comm: Any, algorithm: str = "auto") -> None:
        for row in data:
            comm.all_reduce(row, "max", algorithm)

    found, first = rounds(comms, {"raise": work, "replay": work, "again": work}, number)
    chains = {
        "raise": work,
        "ring": lambda comm: work(comm, "ring"),
        "ring-logged": lambda comm: work(comm, "ring-logged"),
    }
    chain, _ = rounds(comms, chains, number)
    for base in ("raise", "ring"):
        found[f"ring-logged/{base}"] = chain["ring-logged"] / chain[base]
    return found, first["replay"], calls


def messages(comms: dict[str, Any], size: int, number: int) -> tuple[dict[str, float], float, int]:
    calls = max(2, min(400, (64 << 20) // size))
    data, end = np.ones((calls, size), np.uint8), np.zeros(1, np.uint8)

    def work(comm: Any) -> None:
        if comm.rank == 0:
            for row in data:
                comm.send(row, 1)
            comm.recv(end, 1)
        elif comm.rank == 1:
            for row in data:
                comm.recv(row, 0)
            comm.send(end, 0)

    found, first = rounds(comms, {"raise": work, "replay": work, "again": work}, number)
    return found, first["replay"], calls


def rank_main(args: argparse.Namespace) -> None:
    rank, folder = int(os.environ["RANK"]), os.environ["FOLDER"]
    comms = {}
    for policy in POLICIES:
        log = args.log if policy == "replay" else "all"
        options = ftcomm.Options(policy=policy, transport=args.transport, log_dir=f"{folder}/log", log=log)
        if args.hosts or args.rate is not None:
            options = replace(options, transport="auto", host=f"host-{rank}")
        comms[policy] = ftcomm.init(rank, args.ranks, f"file://{folder}/{policy}", options, job=f"cost-{policy}")
    comms["replay"].resume()
    rows = []
    for what, sizes, measure in (("all_reduce", REDUCE, all_reduce), ("send", SEND, messages)):
        if rank == 0:
            taking_part = args.ranks if what == "all_reduce" else 2
            print(f"\n{what}: {taking_part} ranks, medians of {args.rounds} interleaved rounds; microseconds per call")
            print(
                f"{'bytes':>10} {'raise':>12} {'replay':>12} {'ratio':>8} {'noise':>8} {'first':>8}"
                f" {'ring-logged':>12} {'over ring':>10}",
                flush=True,
            )
        for size in (args.sizes or sizes) if args.only in (None, what) else []:
            found, first, calls = measure(comms, size, args.rounds)
            plain, logged = (1e6 * found[name] / calls for name in POLICIES)
            chain = ""
            if "ring-logged/raise" in found:
                chain = f"{found['ring-logged/raise']:11.2f}x {found['ring-logged/ring']:9.2f}x"
            noise = found["again"] / found["raise"]
            rows.append((what, size, plain, logged, noise, 1e6 * first / calls, chain))
            if rank == 0:
                print(
                    f"{size:10} {plain:12.2f} {logged:12.2f} {logged / plain:7.2f}x {noise:7.2f}x"
                    f" {first / found['raise']:7.2f}x {chain}",
                    flush=True,
                )
    if rank == 0 and args.json:
        args.json.write_text(json.dumps(rows))
    for comm in comms.values():
        comm.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transport", default="shm", choices=["shm", "tcp"])
    parser.add_argument("--hosts", action="store_true", help="each rank pretends to be on a host of its own")
    parser.add_argument(
        "--rate",
        type=rate,
        help="each of two ranks is on a host, with a line of that many bits a second: none, 5G, 100M",
    )
    parser.add_argument("--log", default="all", help="which messages are logged: all, inter-host, or groups as 0,1/2,3")
    parser.add_argument("--only", choices=["all_reduce", "send"])
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes; instead of the usual ones")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rate is not None and args.ranks != 2:
        parser.error("--rate has two hosts of one rank: give --ranks 2")
    if "RANK" in os.environ:
        rank_main(args)
    elif args.rate is None:
        run_ranks(args.ranks)
    else:
        own_namespace(sys.argv)
        with line(Shape(args.rate, 0)) as joined:
            print(joined)
            run_ranks(
                2,
                through=[host.command() for host in joined.hosts],
                FTCOMM_INTERFACE=DEVICE,
                FTCOMM_SECRET=secrets.token_hex(16),
            )


if __name__ == "__main__":
    main()
