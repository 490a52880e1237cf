"""The demonstration behind `make demo`: the same training twice, once undisturbed, once with rank 2 killed.

Rank 2 gets SIGKILL in the middle of an all-reduce. The demo fails (exit code 1) unless all of this is so: the kill happened;
the other three repaired that very all-reduce; a replacement took slot 2 again; all ranks end with bitwise equal weights;
and the accuracy is within a point of the undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ftcomm.launch import timeline
from ftcomm.launch.folder import Event, read_events

HERE = Path(__file__).resolve().parent
WORLD = 4
VICTIM = 2


def train(folder: Path, steps: int, faults: str | None) -> None:
    """One run under ftrun, with its output on this terminal."""
    shutil.rmtree(folder / "results", ignore_errors=True)
    command = [sys.executable, "-m", "ftcomm.launch.cli", "--nproc-per-node", str(WORLD), "--policy", "lossy"]
    command += ["--events", str(folder)]
    if faults:
        command += ["--faults", faults]
    command += [str(HERE / "train_digits.py"), "--steps", str(steps), "--report", str(folder / "results")]
    shown = ["ftrun", *command[3:-5], "examples/train_digits.py"]
    print("$ " + " ".join(f'"{word}"' if " " in word or ";" in word else word for word in shown), flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    status = subprocess.run(command, env=environment, check=False).returncode
    if status != 0:
        raise SystemExit(f"demo: ftrun ended with {status}")


def results(folder: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in (folder / "results").glob("result-*.json")]
    return {result["rank"]: result for result in found}


def complaints(events: list[Event], after: dict[int, dict[str, Any]]) -> list[str]:
    """What is not as promised of the run with the kill."""
    wrong = []
    if not any(e["event"] == "exit" and e["rank"] == VICTIM and e["code"] == -9 for e in events):
        wrong.append(f"rank {VICTIM} was not killed: the failpoint was never reached")
    repaired = {e["rank"] for e in events if e["event"] == "repaired" and VICTIM not in e["ranks"]}
    missing = set(range(WORLD)) - {VICTIM} - repaired
    if missing:
        wrong.append(f"ranks {sorted(missing)} did not finish the interrupted all-reduce by a repair")
    if not any(e["event"] == "joined" and e["slot"] == VICTIM for e in events):
        wrong.append(f"no replacement took slot {VICTIM} again")
    if after.get(VICTIM, {}).get("incarnation") != 1:
        wrong.append(f"slot {VICTIM} did not end the run with its replacement")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kill-at", type=int, help="training step (default: after a quarter)")
    parser.add_argument("--folder", type=Path, default=Path("run"))
    args = parser.parse_args()
    kill_at = args.kill_at if args.kill_at is not None else args.steps // 4

    print("The same training twice: 4 ranks, a small CNN, images of handwritten digits. A minute or two each.\n")
    print("1. Undisturbed", flush=True)
    train(args.folder / "quiet", args.steps, None)
    print(f"\n2. Rank {VICTIM} gets SIGKILL in the middle of an all-reduce of step {kill_at}", flush=True)
    train(args.folder, args.steps, f"rank={VICTIM},at=collective.part:1,step={kill_at},do=kill")

    quiet, disturbed = results(args.folder / "quiet"), results(args.folder)
    events = read_events(args.folder / "events.jsonl")
    picture = args.folder / "timeline.png"
    print()
    timeline.main([str(args.folder / "events.jsonl"), "-o", str(picture)])

    wrong = complaints(events, disturbed)
    for name, run in (("undisturbed", quiet), ("disturbed", disturbed)):
        if set(run) != set(range(WORLD)):
            wrong.append(f"the {name} run ended with the results of ranks {sorted(run)} only")
        elif len({result["weights"] for result in run.values()}) != 1:
            wrong.append(f"the ranks of the {name} run ended with different weights")
    if quiet and disturbed:
        before, after = (100 * next(iter(run.values()))["accuracy"] for run in (quiet, disturbed))
        print(
            f"accuracy undisturbed {before:.2f} %, with the kill {after:.2f} %: difference {after - before:+.2f} points"
        )
        if abs(after - before) > 1:
            wrong.append("the accuracies differ by more than one point")
    for complaint in wrong:
        print(f"demo: NOT AS PROMISED: {complaint}", file=sys.stderr)
    if not wrong:
        back = next(e["step"] for e in events if e["event"] == "rejoined" and e["slot"] == VICTIM)
        print(
            f"Rank {VICTIM} was killed in the middle of an all-reduce. The others finished it without that rank and trained on.\n"
            f"A replacement came in at step {back}. All {WORLD} ranks ended with bitwise equal weights.\n"
            f"{picture} shows what each rank was doing."
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
