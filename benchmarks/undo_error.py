"""How far plain undo is off: ftcomm.recovery.Undo(optimizer, exact=False) after random steps, for each optimizer it knows.

    python benchmarks/undo_error.py [--cases 1000] [--size 64] [--history 5] [--dtype float32] [--seed 1]

A case is one parameter of ``size`` normal values that took ``history`` steps along normal gradients and one more that is
undone; every 50 cases have settings of their own, drawn by lot. Printed are the share of values that differ in any bit from
before that step, and the largest error over the largest of the value before, the value after, and 1 % of the largest value of
its tensor ("relative"; a value near zero in a sum has no digits of its own). No time is measured. timm's Lamb and Lars come
along if timm can be imported (it asks for torchvision).
"""

from __future__ import annotations

import argparse
import importlib
import random
from typing import Any

import torch

from ftcomm.recovery import Undo

NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Lamb", "Lars")
PER_GROUP = 50
FLOOR = 0.01


def optimizer_class(name: str) -> Any:
    if name not in ("Lamb", "Lars"):
        return getattr(torch.optim, name)
    try:
        return getattr(importlib.import_module("timm.optim"), name)
    except (ImportError, RuntimeError):  # timm asks for torchvision
        return None


def settings(name: str, draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lr": 10 ** draw.uniform(-5, -2),
        "weight_decay": draw.choice([0.0, 10 ** draw.uniform(-4, -1)]),
    }
    if name in ("SGD", "Lars"):
        found |= {"momentum": draw.choice([0.0, 0.9]), "nesterov": False}
        found["nesterov"] = found["momentum"] > 0 and draw.random() < 0.5
    elif name == "RMSprop":
        found |= {"alpha": 0.99, "momentum": draw.choice([0.0, 0.9]), "centered": draw.random() < 0.5}
    elif name != "Adagrad":
        found["betas"] = (0.9, draw.choice([0.95, 0.999]))
    return found


def shift(was: torch.Tensor, later: torch.Tensor, now: torch.Tensor) -> tuple[int, float]:
    scale = torch.maximum(was.double().abs(), later.double().abs())
    scale = scale.clamp(min=max(FLOOR * float(scale.max()), 1e-300))
    return int((was != now).sum()), float(((now.double() - was.double()).abs() / scale).max())


def measure(name: str, kind: Any, args: argparse.Namespace) -> str:
    draw, gen = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)

    def values() -> torch.Tensor:
        return torch.randn(args.size, generator=gen).to(dtype)

    params = [torch.nn.Parameter(values()) for _ in range(args.cases)]
    groups = [{"params": params[at : at + PER_GROUP], **settings(name, draw)} for at in range(0, args.cases, PER_GROUP)]
    optimizer = kind(groups)
    undo = Undo(optimizer, exact=False)

    def state() -> list[list[torch.Tensor]]:
        return [
            [v.clone() for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor) and v.dim()]
            for p in params
        ]

    for _ in range(args.history + 1):
        for p in params:
            p.grad = values()
        before, states = [p.detach().clone() for p in params], state()
        optimizer.step()
    later, later_states = [p.detach().clone() for p in params], state()
    undo.undo()
    of_params = [shift(was, after, now.detach()) for was, after, now in zip(before, later, params, strict=True)]
    of_states = [
        shift(*three)
        for one, two, three_ in zip(states, later_states, state(), strict=True)
        for three in zip(one, two, three_, strict=True)
    ]
    cells = [name]
    for found in (of_params, of_states):
        if not found:
            cells += ["none", ""]
            continue
        cells.append(f"{sum(count for count, _ in found) / (len(found) * args.size):.1%}")
        cells.append(f"{max(error for _, error in found):.1e}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="for each optimizer (default 1000)")
    parser.add_argument("--size", type=int, default=64, help="values of each (default 64)")
    parser.add_argument("--history", type=int, default=5, help="steps before the one that is undone (default 5)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{args.cases} cases of {args.size} {args.dtype} values, {args.history} steps before the one that is undone\n"
    )
    print("| optimizer | parameters that differ | relative | state that differs | relative |\n|---|---|---|---|---|")
    for name in NAMES:
        kind = optimizer_class(name)
        print(measure(name, kind, args) if kind else f"| {name} | timm cannot be imported | | | |", flush=True)


if __name__ == "__main__":
    main()
