"""What a killed worker costs a training run with the recovery engine, and what the engine costs when nobody is killed.

    python benchmarks/engine_recovery.py [--kills 20] [--ranks 4] [--memory-mib 1024] [--workers 2] [--strategies ...]

Each strategy is a run under ``ftrun``: DistributedDataParallel, an MLP on random data from a DataLoader with worker processes.
The driver sends SIGKILL to one rank after another, each at a random moment when all train. Every rank holds ``--memory-mib`` that
the kernel has to free at its death. Times are of one clock of the machine (CLOCK_MONOTONIC), in milliseconds:

- *next step*: from the kill until every survivor has committed its next step, less the run's median step (``lossy`` and
  ``rollback``: survivors do not wait for the replacement);
- *joining*: from when the replacement asks to come in, its model built and its loader's workers started, until it has committed
  its first step, less a median step; *transfer* of it is the time in which the state comes over;
- *start*: from the kill until the replacement asks: ftrun, the interpreter, the imports, the model, the loader's workers.

"healthy" is the throughput of undisturbed steps over that of the same loop without an engine (``plain``: DDP with
``ftcomm.torch.lossy_hook``), in runs of their own, in turn, medians of ``--rounds``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STRATEGIES = ["replication", "rollback", "lossy"]
WIDTH, SAMPLES, BATCH = 512, 4096, 16


def worker(args: argparse.Namespace) -> None:
    """A rank. Writes lines ``what time`` into a file of its own."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    import ftcomm.recovery
    import ftcomm.torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("ftcomm")
    held = bytearray(args.memory_mib << 20)
    held[:: os.sysconf("SC_PAGESIZE")] = b"x" * len(held[:: os.sysconf("SC_PAGESIZE")])
    rank, incarnation = dist.get_rank(), int(os.environ.get("FTCOMM_INCARNATION", "0"))
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    )
    optimizer = torch.optim.AdamW(ddp.parameters())
    data = TensorDataset(torch.randn(SAMPLES, 64), torch.randint(10, (SAMPLES,)))
    loader = DataLoader(data, batch_size=BATCH, num_workers=args.workers, persistent_workers=args.workers > 0)
    loss_of = nn.CrossEntropyLoss()
    with open(Path(args.folder) / f"times-{rank}-{incarnation}", "w", buffering=1) as out:

        def say(what: str) -> None:
            out.write(f"{what} {time.monotonic()} {os.getpid()}\n")

        def over(step: int) -> bool:
            stop = torch.tensor([float((Path(args.folder) / "stop").exists() or step >= args.steps)])
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            return bool(stop.item())

        if args.worker == "plain":
            ddp.register_comm_hook(None, ftcomm.torch.lossy_hook)
            sampler: Any = torch.utils.data.DistributedSampler(data)
            loader = DataLoader(
                data, BATCH, sampler=sampler, num_workers=args.workers, persistent_workers=args.workers > 0
            )
            step = 0
            while step < args.steps:
                for x, y in loader:
                    ftcomm.torch.join_point(ddp, optimizer)
                    loss_of(ddp(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    say("step")
                    step += 1
                    if over(step):
                        break
        else:
            engine = ftcomm.recovery.Engine(ddp, optimizer, args.worker)
            for step, (x, y) in engine.steps(loader, epochs=1 << 30):
                with engine.step():
                    loss_of(ddp(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if engine.committed:
                    say("step")
                if over(step):
                    break
    dist.destroy_process_group()


class Run:
    def __init__(self, args: argparse.Namespace, name: str, steps: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ftcomm-bench-"))
        self.ranks = args.ranks
        me = [__file__, "--worker", name, "--folder", str(self.folder), "--steps", str(steps)]
        me += ["--memory-mib", str(args.memory_mib), "--workers", str(args.workers)]
        how = ["--nproc-per-node", str(args.ranks), "--max-restarts", "1000", "--policy", "lossy"]
        with open(self.folder / "out", "w") as out:
            self.process = subprocess.Popen(
                [shutil.which("ftrun") or "ftrun", *how, "--events", str(self.folder / "events"), *me],
                stdout=out,
                stderr=out,
            )
        self.incarnation = [0] * args.ranks

    def times(self, rank: int, what: str) -> list[tuple[float, int]]:
        path = self.folder / f"times-{rank}-{self.incarnation[rank]}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(float(line.split()[1]), int(line.split()[2])) for line in lines if line.split()[0] == what]

    def wait(self, reached: Any) -> None:
        until = time.monotonic() + 120
        while not reached():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit((self.folder / "out").read_text()[-4000:])
            time.sleep(0.005)

    def all_train(self, steps: int) -> bool:
        return all(len(self.times(rank, "step")) >= steps for rank in range(self.ranks))

    def event(self, rank: int, name: str) -> dict[str, Any]:
        """The first one of this name that the rank's latest process has told."""
        for path in (self.folder / "events").glob(f"events-{rank}-{self.incarnation[rank]}.jsonl"):
            for line in path.read_text().splitlines():
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name:
                    return event
        raise SystemExit(f"rank {rank} has told of no {name!r}")

    def end(self) -> None:
        (self.folder / "stop").touch()
        try:
            if self.process.wait(60) != 0:
                raise SystemExit((self.folder / "out").read_text()[-4000:])
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                self.process.wait(30)
            shutil.rmtree(self.folder)


def step_of(times: list[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def killed(args: argparse.Namespace, strategy: str) -> dict[str, list[float]]:
    run, rng = Run(args, strategy, 1 << 30), random.Random(strategy)
    found: dict[str, list[float]] = {"next step": [], "joining": [], "transfer": [], "start": []}
    try:
        for number in range(args.kills):
            run.wait(lambda: run.all_train(20))
            time.sleep(rng.random() * 0.2)
            victim = number % args.ranks
            others = [rank for rank in range(args.ranks) if rank != victim]
            pid = run.times(victim, "step")[-1][1]
            before = run.times(others[0], "step")
            step = step_of([t for t, _ in before[-40:]])
            os.kill(pid, signal.SIGKILL)
            at = time.monotonic()
            run.incarnation[victim] += 1
            run.wait(lambda: run.all_train(3))
            after = [min(t for t, _ in run.times(rank, "step") if t > at + step) for rank in others]
            # Events have the time of day.
            asks = run.event(victim, "asking")["time"] + time.monotonic() - time.time()
            first = run.times(victim, "step")[0][0]
            found["next step"].append(max(after) - at - step)
            found["start"].append(asks - at)
            found["joining"].append(first - asks - step)
            found["transfer"].append(float(run.event(victim, "rejoined")["seconds"]))
    finally:
        run.end()
    return found


def healthy(args: argparse.Namespace, name: str) -> float:
    run = Run(args, name, 400)
    try:
        run.wait(lambda: run.all_train(380))
        return step_of([t for t, _ in run.times(0, "step")][50:])
    finally:
        run.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    print(
        f"{args.ranks} ranks, {args.kills} kills, {args.memory_mib} MiB and {args.workers} loader workers each; "
        "ms, median (largest)"
    )
    print("| strategy | next step | joining | transfer | start |\n|---|---|---|---|---|")
    for strategy in args.strategies:
        found = killed(args, strategy)
        cells = [f"{1e3 * statistics.median(v):.1f} ({1e3 * max(v):.1f})" for v in found.values()]
        print(f"| {strategy} | {' | '.join(cells)} |", flush=True)
    rates: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name in ["plain", *args.strategies]:
            rates.setdefault(name, []).append(healthy(args, name))
    print(f"\nhealthy step, medians of {args.rounds} runs\n| | ms | over plain |\n|---|---|---|")
    for name, values in rates.items():
        ratio = statistics.median(value / plain for value, plain in zip(values, rates["plain"], strict=True))
        print(f"| {name} | {1e3 * statistics.median(values):.2f} | {ratio:.3f} |")


if __name__ == "__main__":
    sys.exit(main())
