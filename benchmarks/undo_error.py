"""How far plain undo is off: ftcomm.recovery.Undo(optimizer, exact=False) after random steps, for each optimizer it knows.

    python benchmarks/undo_error.py [--gradients normal,subnormal,zero,large,huge] [--cases 1000] [--size 64] [--history 5]
                                    [--dtype float32] [--seed 1]

A case is one parameter of ``size`` normal values with settings of its own, drawn by lot (maximize, dampening, Nesterov, foreach
and others among them), that took ``history`` steps along normal gradients and one more that is undone. The gradients of that
one are: normal; the same times an eighth of the smallest normal number (subnormal); zero; the same times 1e10 (large: its
square is finite in float32); the same times a sixteenth of the largest number (huge: its square is not finite). Printed are, for
parameters and for state, of the cases that were not refused,

- the share of values that differ in any bit from before that step ("differ");
- the largest error over the largest of the value before, the value after, and 1 % of the largest value of its tensor
  ("relative"; a value near zero in a sum has no digits of its own);
- the largest error over the value before, or 1 % of the largest before in its tensor ("of the old"): 1 and more is a value of
  which nothing is left.

No time is measured. timm's Lamb and Lars come along if timm is installed: ``pip install --no-deps timm`` will do.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch

from ftcomm.errors import ConfigError
from ftcomm.recovery import Undo

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import timm_optimizers

NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Lamb", "Lars")
TIMM = ("Lamb", "Lars")
KINDS = ("normal", "subnormal", "zero", "large", "huge")
# Of one optimizer: Lamb clips the gradients of all of them together.
TOGETHER = 50
FLOOR = 0.01


def settings(name: str, draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lr": 10 ** draw.uniform(-5, -2),
        "weight_decay": draw.choice([0.0, 10 ** draw.uniform(-4, -1)]),
        "foreach": draw.random() < 0.5,
    }
    if name not in TIMM:
        found["maximize"] = draw.random() < 0.3
    if name in ("SGD", "Lars"):
        found["momentum"] = draw.choice([0.0, 0.5, 0.9, 0.99])
        found["nesterov"] = found["momentum"] > 0 and draw.random() < 0.5
        found["dampening"] = 0.0 if found["nesterov"] else draw.choice([0.0, 0.3])
    elif name == "RMSprop":
        found |= {
            "alpha": draw.choice([0.9, 0.99]),
            "momentum": draw.choice([0.0, 0.9]),
            "centered": draw.random() < 0.5,
        }
    elif name == "Adagrad":
        found["lr_decay"] = draw.choice([0.0, 0.01])
    else:
        found["betas"] = (draw.choice([0.8, 0.9]), draw.choice([0.95, 0.999]))
    return found


class Errors:
    """Of the parameters, or of the state."""

    def __init__(self) -> None:
        self.values = self.different = 0
        self.relative = self.of_old = 0.0

    def add(self, was: torch.Tensor, later: torch.Tensor, now: torch.Tensor) -> None:
        self.values += was.numel()
        self.different += int((was != now).sum())
        off, old = (now.double() - was.double()).abs(), was.double().abs()
        self.relative = max(self.relative, over(off, torch.maximum(old, later.double().abs())))
        self.of_old = max(self.of_old, over(off, old))

    def cells(self) -> list[str]:
        if not self.values:
            return ["none", "", ""]
        return [f"{self.different / self.values:.1%}", f"{self.relative:.1e}", f"{self.of_old:.1e}"]


def over(off: torch.Tensor, scale: torch.Tensor) -> float:
    return float((off / scale.clamp(min=max(FLOOR * float(scale.max()), 1e-300))).max())


def state(optimizer: Any, p: Any) -> list[torch.Tensor]:
    return [v.clone() for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor) and v.dim()]


def measure(name: str, kind: str, args: argparse.Namespace) -> str:
    found = getattr(torch.optim, name) if name not in TIMM else timm_optimizers.load(name)
    if found is None:
        return f"| {name} | {kind} | timm is not installed | | | | | | |"
    draw, gen = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    info = torch.finfo(dtype)
    factor = {"normal": 1.0, "subnormal": info.smallest_normal / 8, "zero": 0.0, "large": 1e10, "huge": info.max / 16}[
        kind
    ]

    def values(factor: float = 1.0) -> torch.Tensor:
        return (torch.randn(args.size, generator=gen, dtype=torch.float64) * factor).to(dtype)

    refused, of_params, of_states = 0, Errors(), Errors()
    for at in range(0, args.cases, TOGETHER):
        params = [torch.nn.Parameter(values()) for _ in range(min(TOGETHER, args.cases - at))]
        optimizer = found([{"params": [p], **settings(name, draw)} for p in params])
        undo = Undo(optimizer, exact=False)
        for step in range(args.history + 1):
            for p in params:
                p.grad = values(factor if step == args.history else 1.0)
            before = [(p.detach().clone(), state(optimizer, p)) for p in params]
            optimizer.step()
        for p, (was, states) in zip(params, before, strict=True):
            later, later_states = p.detach().clone(), state(optimizer, p)
            try:
                undo.undo([p])
            except ConfigError:
                refused += 1
                continue
            of_params.add(was, later, p.detach())
            for three in zip(states, later_states, state(optimizer, p), strict=True):
                of_states.add(*three)
    cells = [name, kind, f"{refused / args.cases:.1%}", *of_params.cells(), *of_states.cells()]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", default=",".join(KINDS), help="of the step that is undone (default: all kinds)")
    parser.add_argument("--cases", type=int, default=1000, help="for each optimizer (default 1000)")
    parser.add_argument("--size", type=int, default=64, help="values of each (default 64)")
    parser.add_argument("--history", type=int, default=5, help="steps before the one that is undone (default 5)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    kinds = args.gradients.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--gradients: {', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    torch.set_num_threads(1)
    print(
        f"{args.cases} cases of {args.size} {args.dtype} values, {args.history} steps before the one that is undone\n"
    )
    print(
        "| optimizer | gradients | refused | parameters: differ | relative | of the old | state: differ | relative | of the old |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        for name in NAMES:
            print(measure(name, kind, args), flush=True)


if __name__ == "__main__":
    main()
