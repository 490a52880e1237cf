"""The inverse of timm's Lamb: Adam's update, scaled by the ratio of two norms that only the time before the step knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ftcomm.recovery.undo.rule import Rule, Settings, Stepped, average_back, ill, number, square_back, wide

__all__ = ["LambRule"]


class LambRule(Rule):
    """Kept are the trust ratio of each parameter and the factor by which all gradients are clipped.

    The ratio needs the norm of the update, weight decay included, so that it is computed once more before each step.
    """

    name = "Lamb"
    scalars = frozenset()
    group_state = ("step",)
    notes_gradients = True

    def no_plain(self, settings: Settings) -> str:
        beta1, beta2 = (number(beta) for beta in settings["betas"])
        reason = ill(f"beta1={beta1:g}", beta1) or ill(f"beta2={beta2:g}", beta2)
        return reason or ill("1 - lr * weight_decay", 1 - _decay(settings))

    def common_note(self, optimizer: Any) -> Any:
        most = optimizer.defaults["max_grad_norm"]
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if most is None or not grads:
            return None
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return (norm / most).clamp_(min=1.0)

    def notes(self, optimizer: Any, group: Mapping[str, Any], params: Sequence[Any], common: Any) -> Sequence[Any]:
        step = number(group.get("step", 0)) + 1
        return [(common, self._ratio(optimizer, group, p, step, common)) for p in params]

    def weakest(self, s: Stepped) -> float:
        if s.settings["decoupled_decay"]:
            return 1.0
        return 1 - s.get("lr") * number(s.note[1]) * s.get("weight_decay")

    def invert(self, s: Stepped) -> None:
        clip, ratio = s.note
        grad = s.grad if clip is None else s.grad / clip
        update = _update(s.settings, number(s.group["step"]), grad, s.state["exp_avg"], s.state["exp_avg_sq"])
        rate, decay = s.get("lr") * number(ratio), s.get("weight_decay")
        left = 1 - (_decay(s.settings) if s.settings["decoupled_decay"] else rate * decay)
        s.p.copy_((wide(s.p) + wide(update) * rate) / left)
        beta1, beta2 = s.betas
        if s.settings["grad_averaging"]:
            average_back(s, "exp_avg", grad, beta1)
        elif "exp_avg" not in s.made:
            s.state["exp_avg"].copy_((wide(s.state["exp_avg"]) - wide(grad)) / beta1)
        square_back(s, "exp_avg_sq", grad, beta2)

    @staticmethod
    def _ratio(optimizer: Any, group: Mapping[str, Any], p: Any, step: float, clip: Any) -> Any:
        if number(group["weight_decay"]) == 0 and not group["always_adapt"]:
            return 1.0
        grad = p.grad if clip is None else p.grad / clip
        state = optimizer.state.get(p) or {}
        beta1, beta2 = (number(beta) for beta in group["betas"])
        average = state["exp_avg"] if state else torch.zeros_like(p)
        square = state["exp_avg_sq"] if state else torch.zeros_like(p)
        average = average.lerp(grad, 1 - beta1) if group["grad_averaging"] else (average * beta1).add_(grad)
        square = (square * beta2).addcmul_(grad, grad, value=1 - beta2)
        update = _update(group, step, grad, average, square)
        if group["decoupled_decay"]:
            weight = p.norm(2.0) * abs(1 - _decay(group))
        else:
            weight = p.norm(2.0)
            update.add_(p, alpha=number(group["weight_decay"]))
        ratio = weight / update.norm(2.0)
        ratio = torch.where((weight > 0) & (update.norm(2.0) > 0), ratio, 1.0)
        return torch.clamp(ratio, max=1.0) if group["trust_clip"] else ratio


def _decay(settings: Mapping[str, Any]) -> float:
    """What decoupled weight decay takes of the parameter in one step."""
    if not settings["decoupled_decay"]:
        return 0.0
    lr, most = number(settings["lr"]), settings["max_lr_snapshot"]
    return (lr**2 / most if settings["corrected_weight_decay"] else lr) * number(settings["weight_decay"])


def _update(settings: Mapping[str, Any], step: float, grad: Any, average: Any, square: Any) -> Any:
    """The step's direction before weight decay, of the moments after the step."""
    beta1, beta2 = (number(beta) for beta in settings["betas"])
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if settings["bias_correction"] else (1.0, 1.0)
    denom = (square.sqrt() / correction2**0.5).add_(settings["eps"])
    update = (average / correction1).div_(denom)
    if settings["caution"]:
        mask = (update * grad > 0).to(grad.dtype)
        mask.div_(mask.mean().clamp_(min=1e-3))
        update.mul_(mask)
    return update
