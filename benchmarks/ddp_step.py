"""Training steps of DistributedDataParallel over ftcomm and over gloo, in turn in the same processes.

    python benchmarks/ddp_step.py [--ranks 4] [--model resnet gpt] [--batch 1 4] [--rounds 9] [--device cuda]
        [--json FILE]

A ResNet-18 (pictures of 32 x 32) and a GPT of 10.8 million parameters (texts of 256 bytes), AdamW, a thread a rank. Each round is
one whole step (forward, backward with its all-reduces, update) over each backend and one without communication (no_sync), in an
order drawn by lot; each of the three has its own copy of the model. Printed are medians over rounds of the slowest rank, the
share of gloo's step that is communication (what the step without takes less), and gloo's time over ftcomm's: the median of the
rounds' ratios with its 95 % confidence interval. Above 1 ftcomm is faster. The gradients of both are compared in the first step.

``--device cuda``: models and texts on the first GPU, which all ranks share; a step ends when the device has done it.
``--memory``: instead, the most memory that a rank has held (its resident set, in MiB) after 5 steps, one job for each backend.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _ranks import meeting_place, run_ranks
from suite.measure import slowest, with_interval

KINDS = ("ftcomm", "gloo", "no communication")
WARM = 2


def model_and_batch(name: str, size: int, device: str) -> tuple[Any, tuple[Any, ...]]:
    from _models import GPT, ResNet, gpt_batch, resnet_batch

    model, batch = (ResNet(), resnet_batch(size)) if name == "resnet" else (GPT(), gpt_batch(size))
    return model.to(device), tuple(part.to(device) for part in batch)


class Trained:
    """A model with its optimizer, over one group."""

    def __init__(self, name: str, size: int, group: Any, device: str = "cpu") -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        model, self.batch = model_and_batch(name, size, device)
        self.end = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.ddp = DistributedDataParallel(model, process_group=group)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(self) -> None:
        self.ddp(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.end()

    def gradients(self) -> list[Any]:
        self.ddp(*self.batch).backward()
        found = [p.grad.clone() for p in self.ddp.parameters()]
        self.optimizer.zero_grad()
        return found


def measure(
    name: str, size: int, groups: dict[str, Any], comm: Any, rounds: int, device: str
) -> dict[str, list[float]]:
    import torch

    runs = {kind: Trained(name, size, group, device) for kind, group in groups.items()}
    for ours, theirs in zip(*(runs[kind].gradients() for kind in ("ftcomm", "gloo")), strict=True):
        torch.testing.assert_close(ours, theirs)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order = random.Random(1)  # the same on all ranks
    for _ in range(rounds + WARM):
        for kind in order.sample(KINDS, len(KINDS)):
            comm.barrier()
            start = time.perf_counter()
            if kind == "no communication":
                with runs[kind].ddp.no_sync():
                    runs[kind].step()
            else:
                runs[kind].step()
            times[kind].append(time.perf_counter() - start)
    return {kind: slowest(seconds[WARM:], comm) for kind, seconds in times.items()}


def rank_main(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True  # the two backends' gradients are compared
    if args.memory:
        dist.init_process_group(os.environ["BACKEND"])
        run = Trained(args.model[0], args.batch[0], dist.group.WORLD)
        for _ in range(5):
            run.step()
        most = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"| {args.model[0]} | {args.batch[0]} | {os.environ['BACKEND']} | {float(most):.0f} |", flush=True)
        dist.destroy_process_group()
        return
    from ftcomm.torch import communicator

    dist.init_process_group("ftcomm")
    gloo = dist.new_group(backend="gloo")
    comm = communicator(dist.group.WORLD)
    groups = {"ftcomm": dist.group.WORLD, "gloo": gloo, "no communication": dist.group.WORLD}
    rows = []
    if comm.rank == 0:
        where = f", one {torch.cuda.get_device_name()} for all" if args.device == "cuda" else ""
        print(f"{comm.size} ranks{where}, medians of {args.rounds} interleaved rounds\n")
        print("| model | batch of a rank | ftcomm, ms | gloo, ms | communication in gloo's step | gloo / ftcomm |")
        print("|---|---|---|---|---|---|")
    for name in args.model:
        for size in args.batch:
            times = measure(name, size, groups, comm, args.rounds, args.device)
            ours, theirs, alone = (statistics.median(times[kind]) for kind in KINDS)
            middle, low, high = with_interval([b / a for a, b in zip(times["ftcomm"], times["gloo"], strict=True)])
            rows.append({"model": name, "batch": size, "ranks": comm.size, "device": args.device, "seconds": times})
            if comm.rank == 0:
                share = max(0.0, 1 - alone / theirs)
                print(
                    f"| {name} | {size} | {1e3 * ours:.1f} | {1e3 * theirs:.1f} | {share:.0%} "
                    f"| {middle:.2f} [{low:.2f}, {high:.2f}] |",
                    flush=True,
                )
    if comm.rank == 0 and args.json:
        args.json.write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", nargs="+", choices=["resnet", "gpt"], default=["resnet", "gpt"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="pictures or texts of a rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--memory", action="store_true", help="of the first model and batch, instead of times")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.memory and args.device != "cpu":
        parser.error("--memory is of the CPU's")
    if "RANK" in os.environ:
        rank_main(args)
        return
    if args.memory and "BACKEND" not in os.environ:
        print("| model | batch of a rank | backend | resident, MiB |\n|---|---|---|---|", flush=True)
        for backend in ("ftcomm", "gloo"):
            code = os.spawnve(
                os.P_WAIT, sys.executable, [sys.executable, *sys.argv], {**os.environ, "BACKEND": backend}
            )
            if code:
                sys.exit(code)
        return
    run_ranks(args.ranks, OMP_NUM_THREADS="1", **meeting_place(args.ranks))


if __name__ == "__main__":
    main()
