"""How soon a replacement has caught up: with its steps done again alone, or together with the survivors.

    python benchmarks/parallel_recovery.py [--stages 4] [--lost 20] [--rounds 5] [--wait 4]
    python benchmarks/parallel_recovery.py --wait 0 --rows 512 --width 512 --layers 6

A pipeline of torch.distributed.pipelining (1F1B) with the recovery engine; `--lost` steps after a checkpoint one stage is killed
in the middle of a step. The strategies `replay` and `parallel-replay` take turns, and each round of each must end with the same
weights, bit for bit, as an undisturbed run: else the benchmark fails.

- catching up: from the end of the first step that the replacement does again to the end of the last one;
- whole: from the kill until all stages have finished the step after it.

With `--wait` each micro-batch waits so many milliseconds in its forward pass and twice as many in its backward pass, as one that
is computed on a device: then helpers take no processor from each other. With `--wait 0` all is computed by the processors.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _diary import read_diaries
from _jobs import FTRUN, Broken, one_thread, run_job

STRATEGIES = ("replay", "parallel-replay")
PATIENCE = 170  # seconds for a run
Row = dict[str, Any]


def run(strategy: str, victim: int, args: argparse.Namespace) -> list[Row]:
    """What the processes of one run have noted; victim -1: undisturbed."""
    folder = Path(tempfile.mkdtemp(prefix="parallel-recovery-"))
    plan = {name: getattr(args, name) for name in ("micro_batches", "rows", "width", "layers", "wait")}
    checkpoint = args.lost + 1  # the next one comes after the kill
    plan |= {"strategy": strategy, "checkpoint": checkpoint, "kill": checkpoint + args.lost, "victim": victim}
    plan |= {"iterations": checkpoint + args.lost + 3, "folder": str(folder)}
    environment = {**one_thread(folder), "PARALLEL": json.dumps(plan)}
    command = [*FTRUN, "--nproc-per-node", str(args.stages), "--policy", "replay"]
    try:
        run_job([*command, str(Path(__file__).with_name("_parallel_ranks.py"))], environment, PATIENCE, strategy)
        return read_diaries(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def digests(notes: list[Row]) -> dict[int, str]:
    return {note["rank"]: note["value"] for note in notes if note["what"] == "digest"}


def spans(notes: list[Row], victim: int, args: argparse.Namespace) -> Row:
    """Seconds, and what the others have done."""
    kill = 2 * args.lost + 1
    killed = next(note["when"] for note in notes if note["what"] == "killed")
    steps = [n for n in notes if n["what"] == "iteration"]
    again = {n["number"]: n["when"] for n in steps if n["rank"] == victim and n["process"] == 1}
    end = max(n["when"] for n in steps if n["number"] == kill + 1)
    first, last = args.lost + 1, kill - 1
    # The first one begins when the checkpoint is loaded: it is left out, and so its end is the begin.
    caught_up = (again[last] - again[first]) / 1e9
    shared = next((n["value"] for n in notes if n["what"] == "parallel-replay"), None)
    row = {"catching up": caught_up, "a step": caught_up / (last - first), "whole": (end - killed) / 1e9}
    before = {n["number"]: n["when"] for n in steps if n["rank"] == victim and n["process"] == 0}
    row["a healthy step"] = (before[kill - 1] - before[first]) / 1e9 / (kill - 1 - first)
    row["shared steps"] = 0 if shared is None else shared["steps"]
    row["helpers"] = 0 if shared is None else sum(map(bool, shared["helpers"].values()))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--lost", type=int, default=20, help="steps from checkpoint to kill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait", type=float, default=4.0, help="milliseconds of a micro-batch's forward pass")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4, help="of each stage")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # takes the launcher and its folder along
    rows: dict[str, list[Row]] = {strategy: [] for strategy in STRATEGIES}
    try:
        wanted = digests(run("replay", -1, args))
        for _ in range(args.rounds):
            for strategy in STRATEGIES:
                notes = run(strategy, args.victim, args)
                if digests(notes) != wanted or len(wanted) != args.stages:
                    raise Broken(f"{strategy}: {digests(notes)} instead of {wanted}")
                rows[strategy].append(spans(notes, args.victim, args))
            if args.json:
                args.json.write_text(json.dumps(rows))
    except Broken as error:
        sys.exit(str(error))
    names = list(rows["replay"][0])
    print(
        f"{args.stages} stages, {args.lost} lost steps, stage {args.victim} killed, medians of {args.rounds} rounds in turn"
    )
    print(f"{'':18}" + "".join(f"{name:>16}" for name in names))
    for strategy in STRATEGIES:
        print(
            f"{strategy:18}" + "".join(f"{statistics.median(r[name] for r in rows[strategy]):16.4f}" for name in names)
        )


if __name__ == "__main__":
    main()
