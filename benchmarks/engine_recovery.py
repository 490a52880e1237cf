"""What a killed worker costs a training run with the recovery engine, and what the engine costs when nobody is killed.

    python benchmarks/engine_recovery.py [--kills 20] [--ranks 4] [--memory-mib 1024] [--workers 2] [--strategies ...]
    python benchmarks/engine_recovery.py --strategies lossy torchft       some of them
    python benchmarks/engine_recovery.py --quick                          two kills of each: does everything work?
    python benchmarks/engine_recovery.py --json FILE --plot FILE          and then  --from FILE --plot FILE  without measuring

Each strategy is a run under ``ftrun``: DistributedDataParallel, an MLP on random data from a DataLoader with worker processes.
The driver sends SIGKILL to one rank after another, each at a random moment when all train. Every rank holds ``--memory-mib`` that
the kernel has to free at its death. Times are of one clock of the machine (CLOCK_MONOTONIC), in milliseconds:

- *next step*: from the kill until every survivor has committed its next step, less the run's median step (``lossy`` and
  ``rollback``: survivors do not wait for the replacement);
- *joining*: from when the replacement asks to come in, its model built and its loader's workers started, until it has committed
  its first step, less a median step; *transfer* of it is the time in which the state comes over;
- *start*: from the kill until the replacement asks: ftrun, the interpreter, the imports, the model, the loader's workers.

torchft (left out, with a line that says so, where it can't be imported) is used as in its own train_ddp.py, over gloo; a
lighthouse takes a silent replica for dead after 5 s, its default, or after 500 ms (torchft-fast). In its *next step* is no wait
for the replacement either, but often gloo's timeout of its example, 5 s: a survivor that has no link to the dead one learns of it
by that. A strategy that does not come to its end is a row "failed", with the reason below the tables.

"healthy" is the throughput of undisturbed steps over that of the same loop without an engine (``plain``: DDP with
``ftcomm.torch.lossy_hook``), in runs of their own, in turn, medians of ``--rounds``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _torchft
from _engine_recovery_plot import draw
from _jobs import FTRUN, Broken, all_tidied, kill_all, one_thread, start, tail

STRATEGIES = ["replication", "rollback", "lossy"]
TORCHFT = _torchft.SETTINGS
PARTS = ("next step", "joining", "transfer", "start")
Row = dict[str, Any]


class Run:
    def __init__(self, args: argparse.Namespace, name: str, steps: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=args.within))
        self.name = name
        self.ranks = args.ranks
        me = [
            str(Path(__file__).with_name("_engine_recovery_ranks.py")),
            name,
            "--folder",
            str(self.folder),
            "--steps",
            str(steps),
        ]
        me += ["--memory-mib", str(args.memory_mib), "--workers", str(args.workers)]
        launcher = [*FTRUN, "--nproc-per-node", str(args.ranks), "--max-restarts", "1000", "--policy", "lossy"]
        launcher += ["--events", str(self.folder / "events")]
        self.peer = name in TORCHFT
        if self.peer:
            launcher = _torchft.launcher(args.ranks, TORCHFT[name])
        me += ["--ranks", str(args.ranks)]
        self.process = start([*launcher, *me], one_thread(self.folder), self.folder / "out")
        self.incarnation = [0] * args.ranks

    def times(self, rank: int, what: str) -> list[tuple[float, int]]:
        path = self.folder / f"times-{rank}-{self.incarnation[rank]}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(float(line.split()[1]), int(line.split()[2])) for line in lines if line.split()[0] == what]

    def wait(self, reached: Any) -> None:
        until = time.monotonic() + 120
        while not reached():
            ended = self.process.poll() is not None
            if (ended and not reached()) or time.monotonic() > until:
                why = "ended too early" if ended else "has not gone on within 120 s"
                raise Broken(f"{self.name}: {why}\n{tail(self.folder / 'out')}")
            for rank in range(self.ranks):
                if (self.folder / f"times-{rank}-{self.incarnation[rank] + 1}").exists():
                    raise Broken(f"{self.name}: rank {rank} died by itself\n{tail(self.folder / 'out')}")
            time.sleep(0.005)

    def all_train(self, steps: int) -> bool:
        return all(len(self.times(rank, "step")) >= steps for rank in range(self.ranks))

    def all_went_on(self, ranks: list[int], since: float) -> bool:
        return all(self.times(rank, "step")[-1][0] > since for rank in ranks)

    def asked(self, rank: int) -> float:
        if self.peer:
            return self.times(rank, "asks")[0][0]
        return float(self.event(rank, "asking")["time"]) + time.monotonic() - time.time()  # events have the time of day

    def transfer(self, rank: int) -> float:
        return float("nan") if self.peer else float(self.event(rank, "rejoined")["seconds"])

    def event(self, rank: int, name: str) -> dict[str, Any]:
        """The first one of this name that the rank's latest process has told."""
        for path in (self.folder / "events").glob(f"events-{rank}-{self.incarnation[rank]}.jsonl"):
            for line in path.read_text().splitlines():
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name:
                    return event
        raise Broken(f"{self.name}: rank {rank} has told of no {name!r}")

    def end(self) -> None:
        """After all that was wanted of it: ends well, but for torchft, whose workers nobody tells that they may stop."""
        (self.folder / "stop").touch()
        deadline = time.monotonic() + 60
        while not self.peer and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self.peer and self.process.poll() != 0:
            raise Broken(f"{self.name}: exit code {self.process.poll()} at the end\n{tail(self.folder / 'out')}")

    def clear(self) -> None:
        kill_all(self.folder)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def step_of(times: list[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def killed(args: argparse.Namespace, strategy: str) -> dict[str, list[float]]:
    run, rng = Run(args, strategy, 1 << 30), random.Random(strategy)
    found: dict[str, list[float]] = {part: [] for part in PARTS}
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
            since = at + step
            run.incarnation[victim] += 1
            # torchft's replacement may be ahead of survivors that still wait for a quorum.
            on = functools.partial(run.all_went_on, others, since)
            run.wait(lambda on=on: run.all_train(3) and on())
            after = [min(t for t, _ in run.times(rank, "step") if t > since) for rank in others]
            asks, first = run.asked(victim), run.times(victim, "step")[0][0]
            found["next step"].append(max(after) - at - step)
            found["start"].append(asks - at)
            found["joining"].append(first - asks - step)
            found["transfer"].append(run.transfer(victim))
        run.end()
    finally:
        run.clear()
    return found


def healthy(args: argparse.Namespace, name: str) -> float:
    run = Run(args, name, 400)
    try:
        run.wait(lambda: run.all_train(380))
        step = step_of([t for t, _ in run.times(0, "step")][50:])
        run.end()
        return step
    finally:
        run.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--memory-mib", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES, *TORCHFT], choices=[*STRATEGIES, *TORCHFT])
    parser.add_argument(
        "--quick", action="store_true", help="2 kills of each, one undisturbed run, 64 MiB: does all work?"
    )
    parser.add_argument("--json", type=Path, help="write every single figure there")
    parser.add_argument("--plot", type=Path, help="draw the medians there (png, svg)")
    parser.add_argument("--from", dest="earlier", type=Path, help="measure nothing: figures of an earlier run")
    args = parser.parse_args()
    if args.quick:
        args.kills, args.rounds, args.memory_mib = 2, 1, 64
    if args.earlier:
        found = json.loads(args.earlier.read_text())
        report(found)
    else:
        args.strategies = _torchft.without_missing(args.strategies)
        with all_tidied() as args.within:
            found = measure(args)
    if args.json:
        args.json.write_text(json.dumps(found))
    if args.plot:
        draw(found["killed"], throughput(found["healthy"]), args.plot)
    if found["failed"]:
        print("\n" + "\n\n".join(found["failed"]), file=sys.stderr)
        sys.exit(1)


def measure(args: argparse.Namespace) -> Row:
    """Seconds of each kill and of each undisturbed run's median step, and why what has failed did; prints the tables."""
    found: Row = {name: getattr(args, name) for name in ("ranks", "kills", "memory_mib", "workers", "rounds")}
    found |= {"killed": {}, "healthy": {name: {} for name in ["plain", *args.strategies]}, "failed": []}
    print(heading(found), flush=True)
    for strategy in args.strategies:
        try:
            found["killed"][strategy] = killed(args, strategy)
        except Broken as error:
            found["killed"][strategy] = None
            found["failed"].append(str(error))
        print(line_of(strategy, found["killed"][strategy]), flush=True)
    for number in range(args.rounds):
        for name in random.Random(number).sample(list(found["healthy"]), len(found["healthy"])):
            try:
                found["healthy"][name][str(number)] = healthy(args, name)
            except Broken as error:
                found["failed"].append(str(error))
    report_healthy(found)
    return found


def heading(found: Row) -> str:
    what = f"{found['ranks']} ranks, {found['kills']} kills, {found['memory_mib']} MiB"
    what += f" and {found['workers']} loader workers each; ms, median (largest)"
    return f"{what}\n| strategy | {' | '.join(PARTS)} |\n|---|---|---|---|---|"


def line_of(strategy: str, parts: dict[str, list[float]] | None) -> str:
    cells = ["failed", "", "", ""]
    if parts is not None:
        cells = [f"{1e3 * statistics.median(parts[part]):.1f} ({1e3 * max(parts[part]):.1f})" for part in PARTS]
    return f"| {strategy} | {' | '.join(cells)} |"


def throughput(rates: dict[str, dict[str, float]]) -> dict[str, list[float]]:
    """Each undisturbed run's over that of the plain loop in the same round."""
    plain = rates["plain"]
    return {name: [plain[n] / step for n, step in steps.items() if n in plain] for name, steps in rates.items()}


def report_healthy(found: Row) -> None:
    rounds, ratios = found["rounds"], throughput(found["healthy"])
    print(f"\nhealthy step, medians of {rounds} runs\n| | ms | over plain | runs |\n|---|---|---|---|")
    for name, values in found["healthy"].items():
        cells = [f"{1e3 * statistics.median(values.values()):.2f}" if values else ""]
        cells.append(f"{statistics.median(1 / ratio for ratio in ratios[name]):.3f}" if ratios[name] else "")
        of_all = len(values) if len(values) == rounds else f"failed {rounds - len(values)} of {rounds}"
        print(f"| {name} | {' | '.join(cells)} | {of_all} |")


def report(found: Row) -> None:
    print(heading(found))
    for strategy, parts in found["killed"].items():
        print(line_of(strategy, parts))
    report_healthy(found)


if __name__ == "__main__":
    main()
