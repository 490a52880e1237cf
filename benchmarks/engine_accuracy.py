"""What a run with deaths comes out with, strategy by strategy: test accuracy, and whether the weights are the undisturbed run's.

    python benchmarks/engine_accuracy.py [--runs 3] [--kills 6] [--epochs 80] [--json FILE] [--plot FILE]
    python benchmarks/engine_accuracy.py --quick                   one run of 20 epochs with 2 kills: does everything work?
    python benchmarks/engine_accuracy.py --from FILE --plot FILE   draws what an earlier run has written

examples/train_engine.py under ftrun, four ranks: a CNN on scikit-learn's handwritten digits (1257 to train on, 540 to test
on). In each run ``--kills`` SIGKILLs, in the first half of the steps, to ranks and at places of a step drawn by lot, the same for
each strategy; ftrun starts replacements. Every other place is within the all-reduce of the gradients: there an average can lose
a part of the victim's gradients, and ``lossy`` uses it so; each run says how many steps that were. The other places are the begin
of a step, and before and after the end of an operation. Moments in the forward pass and the update are not among them: for the
others such a death is one at the next operation.

Under ``replication`` the weights must be the undisturbed run's, bit for bit, else the benchmark fails. A fault whose turn has not
come (its process came in too late) is told: "5 of 6 deaths". No time is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _plots import finish, points, pyplot

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_engine.py"
STRATEGIES = ("replication", "rollback", "lossy")
RANKS = 4
STEPS = 20  # of an epoch
IN_AVERAGE = ("collective.part",)  # gradients only are that large
ELSEWHERE = ("step", "fence.before", "fence.after")
Row = dict[str, Any]


def train(strategy: str, epochs: int, faults: str) -> Row:
    """Accuracy in percent, digest of the weights, deaths, and what the engine says at the end."""
    command = [sys.executable, "-m", "ftcomm.launch.cli", "--nproc-per-node", str(RANKS), "--policy", "lossy"]
    command += ["--max-restarts", "100", *(["--faults", faults] if faults else [])]
    command += [str(SCRIPT), "--strategy", strategy, "--epochs", str(epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = re.search(r"accuracy (\S+) %   weights (\w+)", done.stdout)
    said = re.search(r"ftcomm: (\d+ steps?.*)", done.stderr)
    if done.returncode not in (0, 1) or not found or not said:  # 1: the last replacement came too late
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-30000:]}")
    deaths = len(re.findall(r"fault at \S+: kill", done.stderr))
    return {"strategy": strategy, "accuracy": float(found[1]), "weights": found[2], "said": said[1], "deaths": deaths}


def drawn(seed: int, kills: int, steps: int) -> str:
    """Faults: each rank's first process dies at most once, and its replacements after that one by one."""
    lot = random.Random(seed)
    deaths = [0] * RANKS
    faults = []
    for number, step in enumerate(sorted(lot.sample(range(1, steps // 2), kills))):
        rank = lot.randrange(RANKS)
        point = lot.choice(ELSEWHERE if number % 2 else IN_AVERAGE)
        # A point is passed several times in a step; each of them once.
        where = f"at=step:{step}" if point == "step" else f"at={point}:{lot.randint(1, 3)},step={step}"
        faults.append(f"rank={rank}.{deaths[rank]},{where},do=kill")
        deaths[rank] += 1
    return "; ".join(faults)


def measure(args: argparse.Namespace) -> list[Row]:
    undisturbed = train("replication", args.epochs, "")
    rows = [{**undisturbed, "strategy": "undisturbed", "kills": 0}]
    tell(rows[0])
    for strategy in STRATEGIES:
        for seed in range(args.runs):
            faults = drawn(seed, args.kills, STEPS * args.epochs)
            row = {**train(strategy, args.epochs, faults), "kills": args.kills, "faults": faults}
            if strategy == "replication" and row["weights"] != undisturbed["weights"]:
                sys.exit(f"replication: other weights than undisturbed, with faults {faults}")
            rows.append(row)
            tell(row)
    return rows


def tell(row: Row) -> None:
    deaths = f"   {row['deaths']} of {row['kills']} deaths" if row["kills"] else ""
    print(f"{row['strategy']:12} {row['accuracy']:6.2f} %   {row['said']}{deaths}", flush=True)


def by_strategy(rows: list[Row]) -> dict[str, list[Row]]:
    return {
        name: [row for row in rows if row["strategy"] == name] for name in dict.fromkeys(r["strategy"] for r in rows)
    }


def report(rows: list[Row]) -> None:
    print()
    groups = by_strategy(rows)
    wanted = groups.pop("undisturbed")[0]
    print(f"{'undisturbed':12} {wanted['accuracy']:6.2f} %")
    for strategy, group in groups.items():
        same = (
            "the undisturbed weights" if all(row["weights"] == wanted["weights"] for row in group) else "other weights"
        )
        accuracies = [row["accuracy"] for row in group]
        least, most = min(accuracies), max(accuracies)
        print(
            f"{strategy:12} {statistics.median(accuracies):6.2f} % median of {len(group)} ({least:.2f} to {most:.2f}); {same}"
        )


def draw(rows: list[Row], path: Path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    groups = by_strategy(rows)
    axis.axhline(
        groups.pop("undisturbed")[0]["accuracy"], color="black", linewidth=0.8, linestyle="--", label="nobody dies"
    )
    for at, group in enumerate(groups.values()):
        accuracies = [row["accuracy"] for row in group]
        median = statistics.median(accuracies)
        axis.plot(
            [at - 0.25, at + 0.25], [median] * 2, color="#5b7f95", linewidth=3, label="median" if not at else None
        )
        points(axis, at, accuracies)
    finish(axis, list(groups))
    axis.set_xlim(-0.6, len(groups) - 0.4)
    axis.set_ylabel("accuracy on the test images (%)")
    axis.set_title(f"Runs with {max(row['kills'] for row in rows)} deaths each; points are runs", fontsize=10)
    axis.legend(fontsize=8.5)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="one run of each, 20 epochs, 2 kills")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    parser.add_argument("--plot", type=Path, help="draw it there (png, svg)")
    parser.add_argument("--from", dest="earlier", type=Path, help="train nothing: figures of an earlier run")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.kills, args.epochs = 1, 2, 20
    rows = json.loads(args.earlier.read_text()) if args.earlier else measure(args)
    report(rows)
    if args.json:
        args.json.write_text(json.dumps(rows))
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
