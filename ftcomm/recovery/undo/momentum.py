"""Inverses of SGD and of timm's Lars: a step along a momentum buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from ftcomm.recovery.undo.rule import Rule, Settings, Stepped, ill, negated, number, wide, with_decay

__all__ = ["LarsRule", "SGDRule"]


class SGDRule(Rule):
    name = "SGD"
    scalars = frozenset()

    def no_plain(self, settings: Settings) -> str:
        momentum = number(settings["momentum"])
        if momentum != 0:
            reason = ill(f"momentum={momentum:g}", momentum)
            if reason or not settings["nesterov"]:  # without Nesterov the buffer alone says how far the step went
                return reason
        return ill("1 - lr * weight_decay", 1 - number(settings["lr"]) * number(settings["weight_decay"]))

    def moves_gradient(self, settings: Settings, p: Any) -> bool:
        """torch's foreach code adds Nesterov's momentum to the gradients themselves, if it has made no copy of them before."""
        foreach, fused = settings["foreach"], settings["fused"]
        if foreach is None and not fused:
            _, foreach = _default_to_fused_or_foreach([p], False, use_fused=False)
        copied = settings["maximize"] or number(settings["weight_decay"]) != 0
        return bool(foreach and settings["nesterov"] and number(settings["momentum"]) != 0 and not copied)

    def invert(self, s: Stepped) -> None:
        grad = negated(s)
        if s.moved:
            grad = wide(grad) - wide(s.state["momentum_buffer"]) * s.get("momentum")
        back(s, grad, 1.0)


class LarsRule(Rule):
    """The trust ratio depends on the parameter's norm before the step: that one number is kept."""

    name = "Lars"
    scalars = frozenset()
    notes_gradients = True

    def no_plain(self, settings: Settings) -> str:
        momentum = number(settings["momentum"])
        return ill(f"momentum={momentum:g}", momentum) if momentum != 0 else ""

    def notes(self, optimizer: Any, group: Mapping[str, Any], params: Sequence[Any], common: Any) -> Sequence[Any]:
        if not params or not _adapts(group):
            return [None] * len(params)
        return list(torch._foreach_norm(list(params)))

    def weakest(self, s: Stepped) -> float:
        if s.get("momentum") != 0 and not s.settings["nesterov"]:
            return 1.0
        return 1 - s.get("lr") * s.get("weight_decay") * _lars_ratio(s)

    def invert(self, s: Stepped) -> None:
        back(s, s.grad, _lars_ratio(s))


def back(s: Stepped, grad: Any, ratio: float) -> None:
    """``p -= lr * d``, where d is made of ``(grad + weight_decay * p) * ratio`` and the buffer."""
    lr, momentum, decay = s.get("lr"), s.get("momentum"), s.get("weight_decay")
    if momentum == 0:
        s.p.copy_((wide(s.p) + wide(grad) * (lr * ratio)) / (1 - lr * ratio * decay))
        return
    buf = wide(s.state["momentum_buffer"])
    if s.settings["nesterov"]:
        s.p.copy_((wide(s.p) + (wide(grad) * ratio + buf * momentum) * lr) / (1 - lr * ratio * decay))
    else:
        s.p.copy_(wide(s.p) + buf * lr)
    if "momentum_buffer" not in s.made:
        used = wide(with_decay(grad, s.p, decay)) * ratio
        s.state["momentum_buffer"].copy_((buf - used * (1 - s.get("dampening"))) / momentum)


def _adapts(settings: Mapping[str, Any]) -> bool:
    return bool(settings["weight_decay"] != 0 or settings["always_adapt"])


def _lars_ratio(s: Stepped) -> float:
    if not _adapts(s.settings):
        return 1.0
    w_norm, g_norm = number(s.note), number(s.grad.norm(2.0))
    ratio = 1.0
    if w_norm > 0 and g_norm > 0:
        ratio = s.get("trust_coeff") * w_norm / (g_norm + w_norm * s.get("weight_decay") + s.get("eps"))
    if s.settings["trust_clip"]:
        # timm divides by lr on the device, where 1/0 is infinity.
        ratio = min(ratio / s.get("lr"), 1.0) if s.get("lr") != 0 else 1.0
    return ratio
