"""Recovery of a pipeline, and what being ready for it costs: replay, parallel recovery, global checkpointing, CheckFreq.

    python benchmarks/parallel_recovery.py [--stages 4] [--lost 20] [--rounds 5] [--wait 4] [--json FILE] [--plot FILE]
    python benchmarks/parallel_recovery.py --wait 0 --rows 512 --width 512 --layers 6
    python benchmarks/parallel_recovery.py --systems replay parallel-replay      some of them
    python benchmarks/parallel_recovery.py --quick                               one round of a few iterations: does all work?
    python benchmarks/parallel_recovery.py --from FILE [FILE ...] --plot FILE    draws what earlier runs have written

A pipeline of torch.distributed.pipelining (1F1B) with Adam; `--lost` iterations after a checkpoint one stage is killed in the
middle of an iteration. Systems, which take turns in an order drawn by lot:

- replay: the recovery engine; the stage's replacement loads its checkpoint and does the lost iterations again out of the logs;
- parallel-replay: the same, and the survivors compute micro-batches of it;
- checkpoint: global checkpointing; each stage writes its state with torch.save while all wait, torchrun starts all of them again,
  and all do the lost iterations again;
- checkfreq: snapshots every `--every` iterations (3/5 of `--lost`, as 30 of 50 in SWIFT), copied in memory while the next forward
  and backward pass run, written in the background; torchrun starts all again. The victim dies in the iteration that the next
  snapshot would have been due in: the most that can be lost. Written for the benchmark, it keeps one snapshot of each stage: if
  stages have different ones at the restart, the run has failed;
- plain-gloo, plain-ftcomm: the pipeline with nothing of all that, where nobody dies.

An Elastic-Horovod-like snapshot, as in strategies.py, makes no sense here: it is in the memory of replicas, one of which gives a
replacement its state; a stage has no replica, and its snapshot dies with it.

*recovery* is SWIFT's: from when the last new process is ready (imports, model and optimizer behind it) until all new ones have
begun the iteration that the victim died in. Its parts, *next step* and *iteration* are those of strategies.py; an iteration's
mean has one checkpoint in `--lost` + 1 of them, and one snapshot in `--every`. In the second table:

- whole: from the kill until all stages have finished the iteration after it;
- catching up: from the end of the first iteration that the replacement does again to the end of the last lost one (checkfreq has
  fewer of them), and what one of them takes;
- shared, helpers: iterations that survivors have computed a part of, and how many survivors.

Each run must end with the same weights, bit for bit, as an undisturbed one, else it is told of and counted as failed.

With `--wait` each micro-batch waits so many milliseconds in its forward pass and twice as many in its backward pass, as one that
is computed on a device: then helpers take no processor from each other. With `--wait 0` all is computed by the processors.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from _comparison import (
    PLAIN,
    Row,
    add_arguments,
    in_order,
    iteration,
    measured_or_earlier,
    picture,
    report,
    rows_of,
    spans,
)
from _diary import read_diaries
from _jobs import FTRUN, Broken, one_thread, restarting, run_job

REPLAYS = ("replay", "parallel-replay")
SYSTEMS = (*REPLAYS, "checkpoint", "checkfreq")
PATIENCE = 170  # seconds for a run


def run(system: str, dies: bool, args: argparse.Namespace, within: Path) -> list[Row]:
    """What the processes of one run have noted."""
    folder = Path(tempfile.mkdtemp(prefix=f"{system}-", dir=within))
    name, _, backend = (system, "", "gloo") if system in SYSTEMS else system.partition("-")
    plan = {key: getattr(args, key) for key in ("micro_batches", "rows", "width", "layers", "wait", "every")}
    plan |= {"system": name, "backend": backend, "checkpoint": args.lost + 1, "kill": killed_in(args)}
    plan |= {"victim": args.victim if dies else -1, "iterations": killed_in(args) + 3, "folder": str(folder)}
    environment = {**one_thread(folder), "PARALLEL": json.dumps(plan)}
    command = restarting(args.stages, backend)
    if system in REPLAYS:
        command = [*FTRUN, "--nproc-per-node", str(args.stages), "--policy", "replay"]
    try:
        run_job([*command, str(Path(__file__).with_name("_parallel_ranks.py"))], environment, PATIENCE, system)
        return read_diaries(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def killed_in(args: argparse.Namespace) -> int:
    """The engine's checkpoints come every lost + 1 iterations: the next one after the kill."""
    return 2 * int(args.lost) + 1


def digests(notes: list[Row]) -> dict[int, str]:
    return {note["rank"]: note["value"] for note in notes if note["what"] == "digest"}


def catching_up(notes: list[Row], args: argparse.Namespace) -> Row:
    """Seconds, and what the others have done."""
    kill = killed_in(args)
    killed = next(note["when"] for note in notes if note["what"] == "killed")
    steps = [n for n in notes if n["what"] == "iteration"]
    again = {n["number"]: n["when"] for n in steps if n["rank"] == args.victim and n["process"] == 1}
    end = max(n["when"] for n in steps if n["number"] == kill + 1)
    first, last = min(number for number in again if number > 0), kill - 1
    # The first one begins when the checkpoint is loaded: it is left out, and so its end is the begin.
    caught_up = (again[last] - again[first]) / 1e9
    row = {"whole": (end - killed) / 1e9, "catching up": caught_up, "of it an iteration": caught_up / (last - first)}
    shared = next((n["value"] for n in notes if n["what"] == "parallel-replay"), {"steps": 0, "helpers": {}})
    return row | {"shared": shared["steps"], "helpers": sum(map(bool, shared["helpers"].values()))}


def measure(args: argparse.Namespace, within: Path) -> list[Row]:
    wanted = digests(run("replay", False, args, within))
    if len(wanted) != args.stages:
        raise Broken(f"only stages {sorted(wanted)} have come to the end")

    def once(system: str) -> Row:
        notes = run(system, system not in PLAIN, args, within)
        if digests(notes) != wanted:
            raise Broken(f"{system}: weights {digests(notes)} instead of {wanted}")
        kill, row = killed_in(args), Row()
        if system not in PLAIN:
            row = spans(system, notes, args.stages, args.victim, kill, kill - args.lost) | catching_up(notes, args)
        return row | {
            "iteration": iteration(
                system, notes, kill - (args.every if system == "checkfreq" else args.lost + 1), kill - 1
            )
        }

    return rows_of(args, [*PLAIN, *args.systems], once)


def report_catching_up(rows: list[Row]) -> None:
    names = ("whole", "catching up", "of it an iteration", "shared", "helpers")
    print(f"\n| medians | {' | '.join(names)} |\n|---|---|---|---|---|---|")
    for system, group in in_order(rows, SYSTEMS).items():
        if group and system not in PLAIN:
            cells = [f"{statistics.median(row[name] for row in group):.3f}" for name in names[:3]]
            cells += [f"{statistics.median(row[name] for row in group):g}" for name in names[3:]]
            print(f"| {system} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--lost", type=int, default=20, help="iterations from checkpoint to kill, at least 3")
    parser.add_argument("--every", type=int, help="iterations between checkfreq's snapshots (default: 3/5 of --lost)")
    parser.add_argument("--wait", type=float, default=4.0, help="milliseconds of a micro-batch's forward pass")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4, help="of each stage")
    parser.add_argument("--quick", action="store_true", help="one round, 6 lost iterations, waits of 1 ms")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.lost, args.wait = 1, 6, 1.0
    args.every = args.every or -(-3 * args.lost // 5)
    if args.lost < 3 or not 2 <= args.every <= args.lost:
        parser.error("--lost has to be at least 3, and --every from 2 to --lost")
    rows = measured_or_earlier(args, measure)
    report(rows, SYSTEMS, REPLAYS)
    report_catching_up(rows)
    if args.plot:
        picture(rows, SYSTEMS, "the plain pipeline", args.plot)
    if any("failed" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
