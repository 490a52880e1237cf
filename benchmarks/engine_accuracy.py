"""What a run with deaths comes out with, strategy by strategy: test accuracy, and whether the weights are the undisturbed run's.

    python benchmarks/engine_accuracy.py [--runs 3] [--kills 6] [--epochs 80]

examples/train_engine.py under ftrun, four ranks: a CNN on scikit-learn's handwritten digits (1257 to train on, 540 to test
on). In each run ``kills`` SIGKILLs, in the first half of the steps and to ranks drawn by lot (not rank 0, which prints the
result), the same for each strategy; ftrun starts replacements. Under ``replication`` the weights must be the undisturbed run's,
bit for bit, else the benchmark fails. No time is measured.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_engine.py"
STRATEGIES = ("replication", "rollback", "lossy")
RANKS = 4
STEPS = 20  # of an epoch


def train(strategy: str, epochs: int, faults: str) -> tuple[float, str, str]:
    """Accuracy in percent, digest of the weights, and what the engine says at the end."""
    command = [sys.executable, "-m", "ftcomm.launch.cli", "--nproc-per-node", str(RANKS), "--policy", "lossy"]
    command += ["--max-restarts", "100", *(["--faults", faults] if faults else [])]
    command += [str(SCRIPT), "--strategy", strategy, "--epochs", str(epochs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = re.search(r"accuracy (\S+) %   weights (\w+)", done.stdout)
    said = re.search(r"ftcomm: (\d+ steps?.*)", done.stderr)
    if done.returncode not in (0, 1) or not found or not said:  # 1: the last replacement came too late
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-30000:]}")
    return float(found[1]), found[2], said[1]


def drawn(seed: int, kills: int, steps: int) -> str:
    """Faults: each rank's first process dies at most once, and its replacements after that one by one."""
    lot = random.Random(seed)
    deaths = [0] * RANKS
    faults = []
    for step in sorted(lot.sample(range(1, steps // 2), kills)):
        rank = lot.randrange(1, RANKS)
        faults.append(f"rank={rank}.{deaths[rank]},at=step:{step},do=kill")
        deaths[rank] += 1
    return "; ".join(faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=80)
    args = parser.parse_args()

    accuracy, weights, said = train("replication", args.epochs, "")
    print(f"{'undisturbed':12} {accuracy:6.2f} %   {said}", flush=True)
    for strategy in STRATEGIES:
        found = []
        for seed in range(args.runs):
            faults = drawn(seed, args.kills, STEPS * args.epochs)
            result = train(strategy, args.epochs, faults)
            if strategy == "replication" and result[1] != weights:
                sys.exit(f"replication: other weights than undisturbed, with faults {faults}")
            print(f"{strategy:12} {result[0]:6.2f} %   {result[2]}", flush=True)
            found.append(result)
        same = "the undisturbed weights" if all(w == weights for _, w, _ in found) else "other weights"
        accuracies = [one[0] for one in found]
        print(f"{strategy:12} {statistics.median(accuracies):6.2f} % median of {args.runs}; {same}", flush=True)


if __name__ == "__main__":
    main()
