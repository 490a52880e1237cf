"""What is known of an optimizer: which state its steps keep, and how a step is inverted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "WEAKEST",
    "Rule",
    "Settings",
    "Stepped",
    "average_back",
    "ill",
    "negated",
    "number",
    "square_back",
    "wide",
    "with_decay",
]

# What an inverse divides by (1 - lr * weight_decay, a beta) must be no smaller: each halving costs one more bit.
WEAKEST = 1 / 64

Settings = Mapping[str, Any]


@dataclass
class Stepped:
    """One parameter after the step that is to be inverted.

    Attributes:
        p: the parameter.
        grad: what its gradient was; never written to.
        state: what the optimizer holds for it.
        settings: of its group, as they were at the step.
        group: what the group holds that a step changes (Lamb's counter).
        made: names of the state that this step made: what they were before needs no inverse.
        note: what :meth:`Rule.notes` said before the step.
        moved: the step wrote to the gradient, see :meth:`Rule.moves_gradient`.
    """

    p: Any
    grad: Any
    state: Mapping[str, Any]
    settings: Settings
    group: Mapping[str, Any]
    made: frozenset[str]
    note: Any = None
    moved: bool = False

    def get(self, name: str) -> float:
        """A setting as a number: learning rates and betas may be tensors."""
        return number(self.settings[name])

    @property
    def betas(self) -> tuple[float, float]:
        first, second = self.settings["betas"]
        return number(first), number(second)


class Rule:
    """One kind of optimizer. The plain inverse is in subclasses; without one only exact undo is there."""

    name = ""
    # State that is copied in plain undo as well: counters, of which a float32 past 2**24 could not be inverted.
    scalars: frozenset[str] = frozenset({"step"})
    # What a step changes in the groups.
    group_state: tuple[str, ...] = ()
    # Whether notes() reads the gradients: then a closure must not compute them later.
    notes_gradients = False

    def no_plain(self, settings: Settings) -> str:
        """Why a step with these settings has no plain inverse; '' if it has one."""
        raise NotImplementedError

    def notes(self, optimizer: Any, group: Mapping[str, Any], params: Sequence[Any], common: Any) -> Sequence[Any]:
        """What must be known of each parameter before the step: 0-dim tensors."""
        return [None] * len(params)

    def common_note(self, optimizer: Any) -> Any:
        """What must be known before the step of all parameters together."""
        return None

    def moves_gradient(self, settings: Settings, p: Any) -> bool:
        """Whether the step leaves something else in ``p.grad``."""
        return False

    def weakest(self, s: Stepped) -> float:
        """The smallest divisor where it differs from value to value: known only after the step."""
        return 1.0

    def invert(self, s: Stepped) -> None:
        """Takes the parameter and its state back, but for ``scalars`` and what was made."""
        raise NotImplementedError


def number(value: Any) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else value


def ill(what: str, divisor: float) -> str:
    """The reason against dividing by ``divisor``; '' if it will do."""
    if abs(divisor) >= WEAKEST:
        return ""
    return f"{what} is {divisor:.3g}, and the inverse divides by it: too little of the old value is left in the new one"


def wide(tensor: Any) -> Any:
    """In a type with more digits, so that the inverse adds no rounding of its own to the step's."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.to(torch.float32)
    return tensor.to(torch.float64)


def negated(s: Stepped) -> Any:
    return -s.grad if s.settings.get("maximize") else s.grad


def with_decay(grad: Any, p: Any, weight_decay: float) -> Any:
    """The gradient with weight decay, rounded as the step rounded it."""
    return grad.add(p, alpha=weight_decay) if weight_decay != 0 else grad


def average_back(s: Stepped, name: str, grad: Any, beta: float) -> None:
    """A running average of the gradient."""
    if name not in s.made:
        s.state[name].copy_((wide(s.state[name]) - wide(grad) * (1 - beta)) / beta)


def square_back(s: Stepped, name: str, grad: Any, beta: float) -> None:
    """A running average of its square; rounding must not make it negative."""
    if name not in s.made:
        g = wide(grad)
        s.state[name].copy_(((wide(s.state[name]) - g * g * (1 - beta)) / beta).clamp_(min=0))
