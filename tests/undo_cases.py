"""Random optimizers for the tests of Undo: many small parameters, extreme values, groups with settings drawn by lot."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import timm_optimizers
import torch
from tables import most

GROUPS = 20
INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Lamb", "Lars"]
ALL = [*PLAIN, "Adamax"]
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]
TIMM = ("Lamb", "Lars")
NUMBERS = most([10], [50])  # of batches: a thousand cases of each optimizer in the long tables


def variants(names: list[str]) -> list[tuple[str, dict[str, bool]]]:
    """Each of torch's three ways to make a step, where it has them."""
    fused = [name for name in FUSED if name in names]
    return [
        *((name, {"foreach": False}) for name in names),
        *((name, {"foreach": True}) for name in names),
        *((name, {"fused": True}) for name in fused),
    ]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exact_and_plain() -> list[tuple[str, dict[str, bool], bool]]:
    """Of each variant exact undo, and plain undo if there is one."""
    return [(*variant, exact) for exact in (True, False) for variant in variants(ALL if exact else PLAIN)]


def case_id(value: Any) -> str:
    if isinstance(value, bool):
        return "exact" if value else "plain"
    return value if isinstance(value, str) else next(f"{k}-{v}" for k, v in value.items())


def cls(name: str) -> Any:
    """The optimizer's class; without timm its tests are skipped."""
    if name not in TIMM:
        return getattr(torch.optim, name)
    return timm_optimizers.load(name) or pytest.skip("timm 1.0.31 or later is not installed")


def check(name: str, variant: dict[str, bool], device: str) -> None:
    """Skips what there is not."""
    cls(name)
    if (name, variant, device) == ("Adagrad", {"fused": True}, "cuda"):
        pytest.skip("torch has no fused Adagrad for CUDA")


def settings(name: str, draw: random.Random, plain: bool) -> dict[str, Any]:
    """Of one group, within what plain undo takes if ``plain``."""
    lr = 10 ** draw.uniform(-5, -1)
    decay = draw.choice([0.0, 0.0, 10 ** draw.uniform(-5, -1)])
    found: dict[str, Any] = {"lr": lr, "weight_decay": decay}
    if name not in TIMM:
        found["maximize"] = draw.random() < 0.3
    betas = (draw.uniform(0.5, 0.99), draw.uniform(0.8, 0.9999))
    if name in ("SGD", "Lars"):
        found["momentum"] = draw.choice([0.0, 0.5, 0.9, 0.99])
        found["nesterov"] = found["momentum"] > 0 and draw.random() < 0.4
        found["dampening"] = 0.0 if found["nesterov"] else draw.choice([0.0, 0.3])
    elif name == "RMSprop":
        found |= {"alpha": betas[1], "momentum": draw.choice([0.0, 0.9]), "centered": draw.random() < 0.5}
    elif name == "Adagrad":
        found["lr_decay"] = draw.choice([0.0, 0.01])
    else:
        found["betas"] = betas
    if name in ("NAdam", "RAdam"):
        found["decoupled_weight_decay"] = draw.random() < 0.5
    if name in ("Adam", "AdamW") and not plain:
        found["amsgrad"] = draw.random() < 0.3
    if name == "Lars":
        found |= {"trust_clip": draw.random() < 0.5, "always_adapt": draw.random() < 0.5}
    if name == "Lamb":
        for setting in (
            "bias_correction",
            "grad_averaging",
            "trust_clip",
            "always_adapt",
            "caution",
            "decoupled_decay",
        ):
            found[setting] = draw.random() < 0.5
    return found


def extreme(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    """Zeros of both signs, subnormals, huge ones, NaN with a payload, infinities, and ordinary ones."""
    info = torch.finfo(dtype)
    ordinary = torch.randn(shape, generator=gen, dtype=torch.float64)
    kinds = [
        ordinary,
        torch.zeros(shape),
        -torch.zeros(shape),
        ordinary * info.smallest_normal / 8,
        (ordinary * info.max / 4).clamp(-info.max, info.max),
        torch.full(shape, float("inf")),
        torch.full(shape, float("nan")),
    ]
    chosen = torch.stack([kind.to(dtype) for kind in kinds])
    which = torch.multinomial(torch.tensor([10.0, 2, 2, 3, 3, 0.2, 0.2]), ordinary.numel(), True, generator=gen)
    values = chosen.gather(0, which.reshape(1, *shape))[0]
    nan = values.isnan()
    values.view(INTS[values.element_size()])[nan] |= 5  # a payload
    return values


def ordinary(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)


def make(
    name: str,
    cases: int | tuple[int, ...],
    seed: int,
    dtype: torch.dtype = torch.float32,
    plain: bool = False,
    device: str = "cpu",
    **more: Any,
) -> Any:
    """An optimizer of ``cases`` parameters in groups with settings of their own, or of so many in each; no step was made."""
    draw, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = cases if isinstance(cases, tuple) else (max(1, cases // GROUPS),) * min(cases, GROUPS)
    rows = iter((ordinary if plain else extreme)((sum(sizes), 3), dtype, gen))
    groups = [
        {
            "params": [torch.nn.Parameter(next(rows).clone().to(device)) for _ in range(size)],
            **settings(name, draw, plain),
        }
        for size in sizes
    ]
    return cls(name)(groups, **more)


def batches(name: str, seed: int, number: int = 50, **more: Any) -> Iterator[tuple[int, Any]]:
    """So many optimizers of 20 groups, each with settings of its own, and a seed for the gradients: a thousand cases.

    In one optimizer Lamb, which clips all gradients by one norm, would spoil every case by the NaN of one. Every fifth has two
    parameters in each group, so that foreach and fused code gets lists.
    """
    for at in range(number):
        yield 1000 * seed + at, make(name, GROUPS * (1 + (at % 5 == 0)), 1000 * seed + at, **more)


def parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(optimizer: Any, seed: int, plain: bool = False, missing: float = 0.1) -> None:
    gen, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    values = ordinary if plain else extreme
    params = parameters(optimizer)
    drawn = values((len(params), 3), params[0].dtype, gen)
    for p, row in zip(params, drawn, strict=True):
        p.grad = None if draw.random() < missing else row.clone().to(p.device)


def steps(optimizer: Any, number: int, seed: int, plain: bool = False, missing: float = 0.4) -> None:
    for at in range(number):
        gradients(optimizer, 100 * seed + at, plain, missing)
        optimizer.step()


def picture(optimizer: Any) -> Any:
    """Everything that a step may change."""
    found = optimizer.state_dict()
    state = {at: {k: clone(v) for k, v in values.items()} for at, values in found["state"].items()}
    groups = [{k: clone(v) for k, v in group.items()} for group in found["param_groups"]]
    return [p.detach().clone() for p in parameters(optimizer)], {"state": state, "param_groups": groups}


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def same(one: Any, other: Any) -> bool:
    """Bit for bit, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        as_int = INTS.get(one.element_size()) if one.is_floating_point() else None
        return torch.equal(one.view(as_int), other.view(as_int)) if as_int else torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
