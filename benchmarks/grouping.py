"""How far the planner of selective logging is from the optimum: ftcomm.recovery.plan_groups against exhaustive().

    python benchmarks/grouping.py [--instances 2000] [--machines 10] [--seed 1]

Random pipelines: compute times and message sizes within a factor of 10 (log-uniform; "equal": all sizes the same), a limit
that is uniform between nothing and everything, without and with parallel recovery. Printed are ratios of the expected replay time
to the optimal one: 1.000 is optimal. No time is measured, so the figures are the same on every machine. Takes half a minute.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from ftcomm.recovery import exhaustive, plan_groups

INTERVAL = 100


def instance(random_: random.Random, machines: int, equal: bool) -> tuple[list[float], list[int], int]:
    seconds = [0.1 * 10 ** random_.random() for _ in range(machines)]
    size = int(1e8 * 10 ** random_.random())
    sizes = [size if equal else int(1e8 * 10 ** random_.random()) for _ in range(machines - 1)]
    return seconds, sizes, int(random_.random() * sum(sizes) * INTERVAL)


def row(name: str, ratios: list[float]) -> str:
    ratios.sort()
    at = [ratios[int(p * (len(ratios) - 1))] for p in (0.5, 0.95, 1.0)]
    best = sum(ratio < 1 + 1e-9 for ratio in ratios) / len(ratios)
    return f"| {name} | {at[0]:.3f} | {at[1]:.3f} | {at[2]:.3f} | {best:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2000, help="for each line (default 2000)")
    parser.add_argument("--machines", type=int, default=10, help="2 to 10 (default 10)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| instances | median | 95 % | maximum | optimal |\n|---|---|---|---|---|")
    for equal in (False, True):
        for degree, parallel in ((1, "no parallel recovery"), (None, "parallel recovery")):
            ratios: dict[bool, list[float]] = {False: [], True: []}
            random_ = random.Random(args.seed)
            for _ in range(args.instances):
                seconds, sizes, limit = instance(random_, args.machines, equal)
                given: dict[str, Any] = {
                    "log_limit": limit,
                    "bandwidth": 5e9,
                    "checkpoint_interval": INTERVAL,
                    "degree": degree,
                }
                best = exhaustive(seconds, sizes, **given).replay_seconds
                for improve, found in ratios.items():
                    found.append(plan_groups(seconds, sizes, **given, improve=improve).replay_seconds / best)
            for improve, found in ratios.items():
                how = "improved" if improve else "merging only (SWIFT)"
                print(row(f"{'equal' if equal else 'unequal'} sizes, {parallel}, {how}", found))


if __name__ == "__main__":
    main()
