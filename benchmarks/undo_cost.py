"""What ftcomm.recovery.Undo costs when nothing fails: optimizer.step() alone, with exact and with plain undo, in turn.

    python benchmarks/undo_cost.py [--rounds 31] [--threads 1] [--optimizer AdamW]

A small GPT-like model and a small convolutional net, float32, on this machine's CPU. A round is one whole training step
(forward, backward, optimizer step) under each of the three, in an order drawn by lot; the three are copies of one model.
Printed are medians over rounds: the step in milliseconds, what undo adds to it as a share of the whole training step, and the
bytes it holds.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import statistics
import time
from typing import Any

import torch
from torch import nn

from ftcomm.recovery import Undo

KINDS = ("none", "exact", "plain")


class GPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, words: int = 1000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, text: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        found = self.out(self.body(self.words(text), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), text[:, 1:].flatten())


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(widths)
        ]
        self.body = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 16, 10))

    def forward(self, pictures: Any) -> Any:
        return nn.functional.cross_entropy(self.body(pictures), torch.zeros(len(pictures), dtype=torch.long))


def measure(name: str, model: Any, data: Any, args: argparse.Namespace) -> None:
    runs: dict[str, tuple[Any, Any, Any]] = {}
    for kind in KINDS:
        mine = copy.deepcopy(model)
        optimizer = getattr(torch.optim, args.optimizer)(mine.parameters(), lr=1e-3)
        runs[kind] = mine, optimizer, Undo(optimizer, exact=kind == "exact") if kind != "none" else None
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    wholes: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order = random.Random(1)
    for _ in range(args.rounds + 2):
        for kind in order.sample(KINDS, len(KINDS)):
            mine, optimizer, _undo = runs[kind]
            start = time.perf_counter()
            optimizer.zero_grad()
            mine(data).backward()
            middle = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            steps[kind].append(end - middle)
            wholes[kind].append(end - start)
    step = {kind: statistics.median(values[2:]) for kind, values in steps.items()}
    whole = statistics.median(wholes["none"][2:])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for kind in KINDS:
        undo = runs[kind][2]
        held = undo.memory() if undo else 0
        print(
            f"| {name} ({size / 1e6:.1f} MB) | {kind} | {1e3 * step[kind]:.2f} | {step[kind] / step['none']:.2f} "
            f"| {(step[kind] - step['none']) / whole:+.1%} | {held / 1e6:.3f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--optimizer", default="AdamW", choices=["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    print(f"{args.optimizer}, {args.threads} threads, medians of {args.rounds} interleaved rounds\n")
    print("| model | undo | step, ms | over none | of a training step | holds, MB |\n|---|---|---|---|---|---|")
    measure("GPT-like", GPT(), torch.randint(0, 1000, (8, 64)), args)
    measure("convolutions", Conv(), torch.randn(32, 3, 32, 32), args)


if __name__ == "__main__":
    main()
