"""Replicated stages under the policy replay: how soon a rank is back with its replica's state, and with its checkpoint.

    python benchmarks/twin_recovery.py [--lost 10 50] [--rounds 5] [--width 512] [--layers 6] [--json FILE]

Two stages, each twice, in four processes (_twin_ranks.py). k steps after a checkpoint one of the four is killed at the begin of
a step. Measured in its replacement, from when its imports are done until it has done that step:

- replica: as it is: it takes the state of its replica;
- checkpoint: nobody is asked for a state, so it loads its checkpoint and does k steps again out of the logs.

And in runs in which nobody dies, the median time of a step with all that is done at the end of each for that (notes, a tag of the
state), and with none of it (no-notes). The systems take turns; each run must end with the weights of the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from _diary import read_diaries
from _jobs import FTRUN, Broken, all_tidied, one_thread, run_job

WARM_UP, RANKS, VICTIM = 5, 4, 1
Row = dict[str, Any]


def run(system: str, lost: int, kill: bool, args: argparse.Namespace, folder: Path) -> list[Row]:
    folder.mkdir()
    plan = {"system": system, "folder": str(folder), "width": args.width, "layers": args.layers}
    checkpoint = WARM_UP + lost + 5  # one in the run: of step `checkpoint`; the kill is `lost` steps after it
    steps = checkpoint + lost + 3
    plan |= {"checkpoint": checkpoint, "kill": checkpoint + lost if kill else -1, "steps": steps}
    environment = {**one_thread(folder), "PLAN": json.dumps(plan)}
    command = [*FTRUN, "--nproc-per-node", str(RANKS), "--policy", "replay"]
    run_job([*command, str(Path(__file__).with_name("_twin_ranks.py"))], environment, 170, system)
    return read_diaries(folder)


def digest(notes: list[Row]) -> list[str]:
    found = {note["rank"]: note["value"] for note in notes if note["what"] == "digest"}
    if len(found) != RANKS or len(set(found.values())) != RANKS // 2:
        raise Broken(f"not all have come to the end with the weights of their replica: {found}")
    return [found[rank] for rank in range(RANKS)]


def back(notes: list[Row], killed_in: int) -> dict[str, float]:
    """Of the replacement, in seconds."""
    mine = [note for note in notes if note["rank"] == VICTIM and note["process"] > 0]
    ready = next(note["when"] for note in mine if note["what"] == "ready")
    joined = next(note for note in mine if note["what"] == "joined")
    done = next(note["when"] for note in mine if note["what"] == "step" and note["number"] == killed_in)
    return {"joined": (joined["when"] - ready) / 1e9, "whole": (done - ready) / 1e9, "from": joined["number"]}


def step_time(notes: list[Row]) -> float:
    return (
        statistics.median(note["took"] for note in notes if note["what"] == "step" and note["number"] > WARM_UP) / 1e6
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lost", type=int, nargs="+", default=[10, 50], help="steps from checkpoint to kill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6, help="of a stage, with width x width parameters each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    with all_tidied() as folder:
        for lost in args.lost:
            wanted: list[str] = []
            for number in range(args.rounds):
                for system, kill in (("replica", True), ("checkpoint", True), ("notes", False), ("no-notes", False)):
                    notes = run(system, lost, kill, args, folder / f"{system}-{lost}-{number}")
                    wanted = wanted or digest(notes)
                    if digest(notes) != wanted:
                        raise Broken(f"{system} has ended with other weights")
                    row: Row = {"system": system, "lost": lost}
                    at = WARM_UP + 2 * lost + 5
                    rows.append(row | (back(notes, at) if kill else {"step": step_time(notes)}))
                    if args.json:
                        args.json.write_text(json.dumps(rows))
            report(rows, lost)


def report(rows: list[Row], lost: int) -> None:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["lost"] == lost:
            groups[row["system"]].append(row)
    print(f"\n{lost} steps after the checkpoint; medians of {len(groups['replica'])} rounds in turn (least, largest)")
    for system in ("replica", "checkpoint"):
        begun, whole = ([row[name] for row in groups[system]] for name in ("joined", "whole"))
        first = sorted({row["from"] for row in groups[system]})
        print(
            f"{system:12}joined after {statistics.median(begun):6.3f} s, its step done after {statistics.median(whole):6.3f} s "
            f"({min(whole):.3f}, {max(whole):.3f}); goes on at step {', '.join(map(str, first))}"
        )
    ratios = [a["step"] / b["step"] for a, b in zip(groups["notes"], groups["no-notes"], strict=True)]
    steps = [statistics.median(row["step"] for row in groups[system]) for system in ("notes", "no-notes")]
    print(
        f"a step: {steps[0]:.2f} ms with notes, {steps[1]:.2f} ms without; "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
