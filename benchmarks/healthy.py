"""All-reduce without failures: ftcomm against gloo, size by size, interleaved in one job of plain torch.distributed calls.

    python benchmarks/healthy.py [--ranks 4] [--rounds 9] [--json FILE]

For each size, rounds of the two backends alternate; a round is a fixed number of calls; reported are the medians over rounds on
rank 0 and their ratio (above 1: ftcomm is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from _ranks import meeting_place, run_ranks

SIZES = [8, 64, 512, 4096, 32768, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def rank_main(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    groups = {"ftcomm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = []
    for size in SIZES:
        data = torch.ones(size // 4, dtype=torch.float32)
        calls = max(2, min(200, (32 << 20) // max(size, 1)))
        times: dict[str, list[float]] = {name: [] for name in groups}
        for round_number in range(args.rounds + 1):
            for name, group in groups.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    dist.all_reduce(data, group=group)
                if round_number > 0:  # the first warms up
                    times[name].append((time.perf_counter() - start) / calls * 1e6)
                data.fill_(1)
        rows.append((size, *(statistics.median(times[name]) for name in groups)))
    if dist.get_rank() == 0:
        print(
            f"{args.ranks} ranks, medians of {args.rounds} interleaved rounds; microseconds per all-reduce (float32, sum)"
        )
        print(f"{'bytes':>10} {'ftcomm':>12} {'gloo':>12} {'gloo/ftcomm':>12}")
        for size, ours, theirs in rows:
            print(f"{size:10} {ours:12.1f} {theirs:12.1f} {theirs / ours:12.2f}")
        if args.json:
            args.json.write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    run_ranks(args.ranks, **meeting_place(args.ranks))


if __name__ == "__main__":
    main()
