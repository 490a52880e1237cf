"""What cannot be undone, said before it is too late: when Undo is made, and before each step."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ftcomm.errors import Unsupported
from ftcomm.recovery.undo.adaptive import AdagradRule, AdamaxRule, AdamRule, NAdamRule, RAdamRule, RMSpropRule
from ftcomm.recovery.undo.lamb import LambRule
from ftcomm.recovery.undo.momentum import LarsRule, SGDRule
from ftcomm.recovery.undo.rule import Rule
from ftcomm.recovery.undo.tensors import is_dtensor, no_copy

__all__ = ["check_gradients", "check_groups", "check_memory", "check_params", "rule_of"]

_TORCH: dict[type, Rule] = {
    torch.optim.SGD: SGDRule(),
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(),
    torch.optim.NAdam: NAdamRule(),
    torch.optim.RAdam: RAdamRule(),
    torch.optim.Adamax: AdamaxRule(),
    torch.optim.RMSprop: RMSpropRule(),
    torch.optim.Adagrad: AdagradRule(),
}
# Looked up among the imported modules: whoever has a Lamb has imported it.
_TIMM: dict[tuple[str, str], Rule] = {
    ("timm.optim.lamb", "Lamb"): LambRule(),
    ("timm.optim.lars", "Lars"): LarsRule(),
}
TIMM_READ = (1, 0, 31)
_COPY = "Save a copy of parameters and optimizer.state_dict() before the step instead."


def rule_of(optimizer: Any, exact: bool) -> Rule:
    """The rule of exactly this class: a subclass may do anything in its step."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Unsupported(f"Undo takes a torch.optim.Optimizer or several, not {name}.")
    if kind in _TORCH:
        return _TORCH[kind]
    for (module, attribute), rule in _TIMM.items():
        if getattr(sys.modules.get(module), attribute, None) is kind:
            if not exact and _timm() < TIMM_READ:
                wanted = ".".join(map(str, TIMM_READ))
                raise Unsupported(f"Plain undo of {name} follows timm {wanted}; here it is older. Use exact=True.")
            return rule
    if kind is torch.optim.LBFGS:
        raise Unsupported(
            f"LBFGS cannot be undone: a step evaluates the model many times and its history is a list, of which Undo knows "
            f"no copy. {_COPY}"
        )
    if kind is torch.optim.SparseAdam:
        raise Unsupported(f"SparseAdam cannot be undone: it takes sparse gradients. Use Adam with dense ones. {_COPY}")
    for known in (*_TORCH, torch.optim.LBFGS, torch.optim.SparseAdam):
        if isinstance(optimizer, known):
            raise Unsupported(
                f"{name} is a subclass of {known.__name__}, and what its step does besides is not known. "
                f"Use {known.__name__} itself. {_COPY}"
            )
    names = [known.__name__ for known in _TORCH] + [f"timm's {attribute}" for _, attribute in _TIMM]
    raise Unsupported(f"{name} is not known to Undo. Known are {', '.join(names)}. {_COPY}")


def check_groups(optimizer: Any, rule: Rule, exact: bool) -> None:
    """Refuses settings that cannot be undone; they may change from step to step."""
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise Unsupported(
                f"{name} with differentiable=True (group {number}) cannot be undone: autograd's graph goes through the step. "
                "Switch it off, or use a functional optimizer, which changes nothing in place."
            )
        if not exact and group.get("capturable"):
            raise Unsupported(
                f"{name} with capturable=True (group {number}) has no plain undo: its corrections of the first steps are rounded "
                "on the device, which changes more than the last digits. Use exact=True, or capturable=False."
            )
        if not exact and (reason := rule.no_plain(group)):
            raise Unsupported(f"{name} (group {number}) has no plain undo: {reason}. Use exact=True.")


def check_params(optimizer: Any, exact: bool) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        for p in group["params"]:
            if reason := no_copy(p):
                raise Unsupported(
                    f"A parameter of {name} is {reason}; Undo knows dense torch.Tensor and torch.nn.Parameter, and DTensors of "
                    f"such shards. {_COPY}"
                )
            if exact:
                continue
            if is_dtensor(p):
                raise Unsupported(
                    f"A parameter of {name} is a DTensor, and plain undo knows whole tensors only: norms would have to be "
                    "computed with the other ranks, of which some may be gone. Use exact=True, which copies the local shard."
                )
            if not p.is_floating_point():
                raise Unsupported(
                    f"A parameter of {name} is of {p.dtype}; plain undo takes real numbers. Use exact=True."
                )


def check_memory(optimizer: Any) -> None:
    """Refuses, for plain undo, memory that one step updates twice: then the inverses would have to be in the reverse order."""
    spans: list[tuple[Any, int, int]] = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        first = p.data_ptr()
        if p.numel() and first:
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((str(p.device), first, first + (last + 1) * p.element_size()))
    spans.sort()
    for (device, _, end), (other, start, _) in itertools.pairwise(spans):
        if device == other and start < end:
            raise Unsupported(
                f"A parameter is twice in {type(optimizer).__name__}, or two of its parameters share memory: one step may update "
                "it twice, which plain undo cannot tell. Give each parameter once, or use exact=True."
            )


def check_gradients(optimizer: Any, rule: Rule, closure: bool, exact: bool) -> None:
    """Refuses, before a step, gradients whose step cannot be undone."""
    name = type(optimizer).__name__
    if closure and not exact and rule.notes_gradients:
        raise Unsupported(
            f"{name}.step(closure) has no plain undo: norms are kept before the step, and the closure computes the gradients "
            "in it. Call the closure's content first, then step() without it; or use exact=True."
        )
    for p in _with_gradient(optimizer.param_groups):
        if p.grad.layout is not torch.strided:
            raise Unsupported(
                f"A gradient of {name} is sparse, and a step along it cannot be undone. Use dense gradients "
                "(sparse=False of torch.nn.Embedding)."
            )
    first = optimizer.param_groups[0]["params"][:1]
    if first and first[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            f"{name}.step() is being captured into a CUDA graph: a replay would not tell Undo of its steps. "
            "Leave the step out of the graph, or close() the Undo."
        )


def _with_gradient(groups: Iterable[Mapping[str, Any]]) -> Iterable[Any]:
    return (p for group in groups for p in group["params"] if p.grad is not None)


def _timm() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("timm")
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
