"""Trains a small CNN on scikit-learn's handwritten digits with plain DistributedDataParallel over backend="ftcomm".

    ftrun --nproc-per-node 4 --policy lossy examples/train_digits.py

All that there is for failures: the policy above, the comm hook and `join_point`. A worker that dies is left out of the
averages until its replacement, which runs this same script, has come in at a join point.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ftcomm.torch

SEED = 7
PEAK_RATE = 0.1


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (8 x 8, 0 to 1) and labels: 1257 to train on, 540 to test on. The data is a part of scikit-learn."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    train, test = order[:1257], order[1257:]
    return images[train], labels[train], images[test], labels[test]


def build() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip


def seed_of(step: int, rank: int) -> int:
    return (SEED * 1_000_000 + step) * 1_000 + rank


def batch_of(step: int, rank: int, images: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A rank's batch depends on step and rank alone, so that a replacement draws what its predecessor would have."""
    generator = torch.Generator().manual_seed(seed_of(step, rank))
    chosen = torch.randint(len(labels), (size,), generator=generator)
    shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return torch.roll(images[chosen], shift, dims=(2, 3)), labels[chosen]


def rate_at(step: int, steps: int) -> float:
    """Up over the first steps, then down to zero along a cosine."""
    warm = min(1.0, (step + 1) / 50)
    return PEAK_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def digest(model: nn.Module) -> str:
    """The same on two ranks only if all weights are bitwise equal."""
    state = hashlib.sha256()
    for value in model.state_dict().values():
        state.update(value.numpy().tobytes())
    return state.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--report", type=Path, help="folder for result-RANK.json")
    args = parser.parse_args()

    torch.set_num_threads(1)
    images, labels, test_images, test_labels = load()
    dist.init_process_group("ftcomm")
    rank = dist.get_rank()
    model = build()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, ftcomm.torch.lossy_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=PEAK_RATE, momentum=0.9, weight_decay=1e-4)

    while True:
        here = ftcomm.torch.join_point(ddp, optimizer)
        if here.step >= args.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(here.step, args.steps)
        torch.manual_seed(seed_of(here.step, rank))  # for dropout
        inputs, targets = batch_of(here.step, rank, images, labels, args.batch)
        loss = F.cross_entropy(ddp(inputs), targets)
        if here.step % 50 == 0 and rank == min(here.alive):
            print(f"step {here.step:5d}   loss {loss.item():.4f}   alive {list(here.alive)}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    final = accuracy(model, test_images, test_labels)
    if args.report:
        result = {"rank": rank, "incarnation": int(os.environ.get("FTCOMM_INCARNATION", "0")), "accuracy": final}
        args.report.mkdir(parents=True, exist_ok=True)
        (args.report / f"result-{rank}.json").write_text(json.dumps({**result, "weights": digest(model)}) + "\n")
    if rank == min(here.alive):
        print(f"step {args.steps:5d}   accuracy {100 * final:.2f} % on {len(test_labels)} images never trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
