"""What logging costs a pipeline when nothing fails: iterations of 1F1B without a log, logged synchronously, and asynchronously.

    python benchmarks/pipeline_logging.py [--wire shm hosts] [--stages 4] [--rounds 7] [--compute sleep|spin]

There is no model: a stage's computation is a sleep, which is what a host does while its device computes (``spin``: it
keeps the processor instead), and the messages are numpy arrays. The policies are jobs of the same processes, and their rounds
alternate. The next micro-batch's receive is posted before the present one is computed. Between rounds a checkpoint is committed,
so that the log's segments are used again and again; the log keeps what the newest three need, so the first rounds take memory
that was never used: they are not counted, and their ratio is reported beside ("cold"). A round ends with a barrier, and where
logging is asynchronous with everything logged, so that nothing is put off beyond what is measured.

``hosts``: each rank pretends to be a host of its own, so that messages go over tcp and each side keeps its half of the log; else
all are on one, and the record in the log is the message. Reported are medians over rounds of iterations per second, and of the
throughput over that without a log in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from _ranks import run_ranks

import ftcomm

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20]
COLD = 5  # rounds until all memory of the log has been used before
SECRET = "a secret of the benchmark"


def variants(wire: str) -> dict[str, dict[str, Any]]:
    """By name: options of the job. Asynchronous logging is for messages between hosts."""
    found: dict[str, dict[str, Any]] = {"none": {"policy": "raise"}, "sync": {"policy": "replay"}}
    if wire == "hosts":
        found["async"] = {"policy": "replay", "log_mode": "async"}
    return found


def options_of(wire: str, rank: int, more: dict[str, Any], name: str) -> ftcomm.Options:
    if wire == "hosts":
        more = {**more, "host": f"host{rank}", "transport": "tcp", "secret": SECRET, "authority": "store"}
    return ftcomm.Options(**more, log_dir=f"{os.environ['FOLDER']}/log-{name}")


class Pipeline:
    """One stage of a 1F1B schedule without a model."""

    def __init__(self, comm: Any, size: int, args: argparse.Namespace) -> None:
        self.comm, self.stage, self.stages, self.micro = comm, comm.rank, comm.size, args.micro_batches
        self.forward, self.backward, self.spin = args.forward / 1e3, args.backward / 1e3, args.compute == "spin"
        # As large as what is logged in an iteration: with and without a log the same amount of memory is gone through.
        self.out = [np.ones((self.micro, size), np.uint8) for _ in range(2)]
        self.into = [np.zeros((self.micro, size), np.uint8) for _ in range(2)]

    def compute(self, seconds: float) -> None:
        if not self.spin:
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    def iteration(self) -> None:
        stage, last, micro = self.stage, self.stages - 1, self.micro
        pending: list[Any] = []
        inputs: list[Any] = [[], []]

        def post(way: int, number: int) -> None:
            source = stage - 1 if way == 0 else stage + 1
            if number < micro and 0 <= source <= last and len(inputs[way]) == number:
                inputs[way].append(self.comm.irecv(self.into[way][number], source, tag=way))

        def one(way: int, number: int) -> None:
            post(way, number)
            post(way, number + 1)
            if inputs[way]:
                inputs[way][number].wait()
            self.compute(self.forward if way == 0 else self.backward)
            target = stage + 1 if way == 0 else stage - 1
            if 0 <= target <= last:
                pending.append(self.comm.isend(self.out[way][number], target, tag=way))

        warm = min(last - stage, micro)
        for number in range(warm):
            one(0, number)
        for number in range(micro - warm):
            one(0, warm + number)
            one(1, number)
        for number in range(micro - warm, micro):
            one(1, number)
        for request in pending:
            request.wait()


def measure(pipelines: dict[str, Pipeline], args: argparse.Namespace) -> dict[str, list[float]]:
    """Iterations per second, by round, those on fresh pages first."""
    rates: dict[str, list[float]] = {name: [] for name in pipelines}
    for number in range(COLD + args.rounds):
        names = list(pipelines)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            pipeline, comm = pipelines[name], pipelines[name].comm
            comm.barrier()
            start = time.perf_counter()
            for _ in range(args.iterations):
                pipeline.iteration()
            if name == "async":
                comm.log_flush()
            comm.barrier()
            rates[name].append(args.iterations / (time.perf_counter() - start))
            if name != "none":
                comm.commit_checkpoint(number)
    return rates


def ratio(rates: dict[str, list[float]], name: str, counted: slice) -> float:
    pairs = zip(rates[name][counted], rates["none"][counted], strict=True)
    return statistics.median(mine / none for mine, none in pairs)


def line(label: str, rates: dict[str, list[float]]) -> str:
    steady, cold = slice(COLD, None), slice(1, COLD - 1)  # the very first one is also the buffers' first
    plain = statistics.median(rates["none"][steady])
    shown = "".join(
        f"{statistics.median(rates[n][steady]):10.3f} {ratio(rates, n, steady):7.3f} {ratio(rates, n, cold):7.3f}"
        for n in ("sync", "async")
        if n in rates
    )
    return f"{label:>12} {plain:10.3f} {shown}"


def heading(args: argparse.Namespace, wire: str) -> None:
    print(
        f"\n{wire}: {args.stages} stages, {args.micro_batches} micro-batches, medians of {args.rounds} rounds in turn"
    )
    columns = "".join(f"{name:>10} {'ratio':>7} {'cold':>7}" for name in ("sync", "async") if name in variants(wire))
    print(f"{'bytes':>12} {'none, it/s':>10} {columns}", flush=True)


def rank_main(args: argparse.Namespace) -> None:
    rank, folder = int(os.environ["RANK"]), os.environ["FOLDER"]
    rows = []
    jobs = []  # left at the end: a process that has left a job under replay starts no other
    for wire in args.wire:
        comms = {}
        for name, more in variants(wire).items():
            options = options_of(wire, rank, more, name)
            comms[name] = ftcomm.init(
                rank, args.stages, f"file://{folder}/{wire}-{name}", options, job=f"pipe-{wire}-{name}"
            )
            if name != "none":
                comms[name].resume()
        if rank == 0:
            heading(args, wire)
        for size in args.sizes:
            rates = measure({name: Pipeline(comm, size, args) for name, comm in comms.items()}, args)
            rows.append((wire, size, rates))
            if rank == 0:
                print(line(str(size), rates), flush=True)
        jobs += comms.values()
    for comm in jobs:
        comm.leave()
    if rank == 0 and args.json:
        args.json.write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", nargs="+", choices=["shm", "hosts"], default=["shm", "hosts"])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=2, help="in a round")
    parser.add_argument("--compute", choices=["sleep", "spin"], default="sleep")
    parser.add_argument("--forward", type=float, default=5.0, help="milliseconds for a micro-batch")
    parser.add_argument("--backward", type=float, default=10.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of an activation, and of a gradient")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    run_ranks(args.stages)


if __name__ == "__main__":
    main()
