"""What ftcomm.recovery.Undo costs when nothing fails: optimizer.step() alone, with exact and with plain undo, in turn.

    python benchmarks/undo_cost.py [--rounds 15] [--threads 1] [--optimizer AdamW] [--texts 16] [--pictures 64]

A GPT of 10.8 million parameters (--texts sequences of 256 tokens in a batch) and a ResNet-18 (--pictures of 32 x 32), float32, on
this machine's CPU. A round is one whole training step (forward, backward, optimizer step) under each of the three, in an order
drawn by lot; the three are copies of one model. Printed are medians over rounds: the optimizer's step in milliseconds, what undo
adds to it in milliseconds and as a share of the whole training step, and the bytes it holds. What undo adds does not depend on
the batch; the share does.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from typing import Any

import torch
from _models import GPT, ResNet, gpt_batch, resnet_batch

from ftcomm.recovery import Undo

KINDS = ("none", "exact", "plain")
WARM = 2  # rounds


def measure(name: str, model: Any, data: tuple[Any, ...], args: argparse.Namespace) -> None:
    runs: dict[str, tuple[Any, Any, Any]] = {}
    for kind in KINDS:
        mine = copy.deepcopy(model)
        optimizer = getattr(torch.optim, args.optimizer)(mine.parameters(), lr=1e-3)
        runs[kind] = mine, optimizer, Undo(optimizer, exact=kind == "exact") if kind != "none" else None
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    wholes: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order = random.Random(1)
    for _ in range(args.rounds + WARM):
        for kind in order.sample(KINDS, len(KINDS)):
            mine, optimizer, _undo = runs[kind]
            start = time.perf_counter()
            optimizer.zero_grad()
            mine(*data).backward()
            middle = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            steps[kind].append(end - middle)
            wholes[kind].append(end - start)
    step = {kind: statistics.median(values[WARM:]) for kind, values in steps.items()}
    whole = statistics.median(wholes["none"][WARM:])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for kind in KINDS:
        undo = runs[kind][2]
        held = undo.memory() if undo else 0
        print(
            f"| {name} ({size / 1e6:.1f} MB, {whole:.2f} s) | {kind} | {1e3 * step[kind]:.1f} "
            f"| {1e3 * (step[kind] - step['none']):+.1f} | {(step[kind] - step['none']) / whole:+.2%} | {held / 1e6:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--optimizer", default="AdamW", choices=["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop"])
    parser.add_argument("--texts", type=int, default=16, help="sequences in a batch of the GPT")
    parser.add_argument("--pictures", type=int, default=64, help="in a batch of the ResNet")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    print(f"{args.optimizer}, {args.threads} threads, medians of {args.rounds} interleaved rounds\n")
    print("| model (parameters, training step) | undo | optimizer, ms | more, ms | of a training step | holds, MB |")
    print("|---|---|---|---|---|---|")
    measure("GPT", GPT(), gpt_batch(args.texts), args)
    measure("ResNet-18", ResNet(), resnet_batch(args.pictures), args)


if __name__ == "__main__":
    main()
