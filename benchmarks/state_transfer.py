"""How long a replacement waits for the state of a training: from one survivor and from all, beside a copy and a plain message.

    python benchmarks/state_transfer.py [--ranks 4] [--sizes 1 64 256 1024] [--rounds 5] [--transport shm|tcp]

The last rank gets the state (parameters and Adam's two moments, in float32) from the others, as at a join point: agreement,
header, blocks with checksums, loading; not the process's start. Kinds take turns, round by round; medians in ms (largest):

- *copy*: of as many bytes from memory to memory of one process that had not been used before, as two thirds of the state go to;
- *message*: one send of as many bytes from rank 0, received into memory like that, without checksums of its own;
- *one*, *all*: the state from one survivor, from all others, however many processors there are.

The load average is of the machine, before and after.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from _ranks import meeting_place, run_ranks

_TAG = 7


def rank_main(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from ftcomm.torch import transfer
    from ftcomm.torch.point import point_of

    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    newcomer = dist.get_rank() == args.ranks - 1
    transfer.cores = lambda: 2 * args.ranks
    model = nn.Module()  # one for all sizes: it has one join point
    point_of(model)
    if newcomer:
        print("| MiB | copy | message | one | all |\n|---|---|---|---|---|", flush=True)
    for size in args.sizes:
        measure(args, model, size << 20, newcomer)
    dist.destroy_process_group()


def measure(args: argparse.Namespace, model: Any, size: int, newcomer: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from ftcomm.torch import join, transfer_plan
    from ftcomm.torch.point import point_of

    group, most = point_of(model).group, max(args.ranks, 2)
    count = max(1, size // 12 // (4 << 20))
    model.parts = nn.ParameterList(torch.full((size // 12 // count,), float(not newcomer)) for _ in range(count))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    if not newcomer:
        for parameter in model.parameters():  # a step would need gradients, and memory for what is in between
            first, second = torch.full_like(parameter, 2.0), torch.full_like(parameter, 3.0)
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": first, "exp_avg_sq": second}
    whole = torch.zeros(size, dtype=torch.uint8) if dist.get_rank() == 0 or newcomer else torch.zeros(0)

    def copy() -> None:
        if newcomer:
            torch.empty(size, dtype=torch.uint8).copy_(whole)

    def message() -> None:
        if dist.get_rank() == 0:
            group.send(whole, args.ranks - 1, _TAG)
        elif newcomer:
            group.recv(torch.empty(size, dtype=torch.uint8), 0, _TAG)

    def state(sources: int) -> None:
        transfer_plan.MOST = sources
        join.share(model, optimizer, None, not newcomer)

    kinds: dict[str, Callable[[], None]] = {
        "copy": copy, "message": message, "one": lambda: state(1), "all": lambda: state(most)
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for round_number in range(args.rounds + 1):
        for name, kind in kinds.items():
            if newcomer:
                optimizer.state.clear()
            dist.barrier()
            start = time.perf_counter()
            kind()
            if round_number > 0:  # the first warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    if newcomer:
        for parameter in model.parameters():
            values = optimizer.state[parameter]
            assert (parameter[-1], values["exp_avg"][0], values["exp_avg_sq"][-1]) == (1, 2, 3)
        cells = [f"{statistics.median(values):.1f} ({max(values):.1f})" for values in times.values()]
        print(f"| {size >> 20} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 256, 1024], help="of the state, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", default="shm", choices=["shm", "tcp"])
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    print(f"{args.ranks} ranks over {args.transport}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}", flush=True)
    try:
        more = {"FTCOMM_TRANSPORT": args.transport, "FTCOMM_POLICY": "lossy"}
        run_ranks(args.ranks, **more, **meeting_place(args.ranks))
    finally:
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
