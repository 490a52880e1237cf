"""Gradients between steps: which parameters have one, and which ones nobody ever clears."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ftcomm.torch.optimizers import parameters_of
from ftcomm.torch.shards import local

__all__ = ["BetweenSteps"]


class BetweenSteps:
    """An optimizer passes over a parameter that has no gradient, and not over one whose gradient is zero (momentum, decay).

    After ``zero_grad(set_to_none=False)`` a parameter that a step does not use has such a gradient. So a replacement, and who
    begins from a checkpoint, gets zeros where the others have a gradient between steps: either it is zero, or the next step
    clears it before it adds its own. The exception is a warning: a gradient of a parameter that the optimizer does not have.
    """

    def __init__(self, module: Any, optimizer: Any) -> None:
        self._module, self._optimizer = module, optimizer
        self._others: list[tuple[str, Any]] | None = None
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks."""
        return {"with": [n for n, parameter in enumerate(parameters_of(self._optimizer)) if parameter.grad is not None]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None
        parameters = parameters_of(self._optimizer)
        for number in state["with"]:
            parameters[number].grad = torch.zeros_like(parameters[number])

    def warn(self) -> None:
        """A step is committed."""
        if self._warned:
            return
        if self._others is None:
            self._others = self._outside()
        if any(_left(parameter) for _, parameter in self._others):
            self._others = self._outside()  # the script may have given some to the optimizer since
        left = [name for name, parameter in self._others if _left(parameter)]
        if left:
            self._warned = True
            warnings.warn(
                f"Parameter {left[0]!r} is not in the optimizer, and has a gradient after the step, which optimizer.zero_grad() "
                "does not clear: it grows from step to step, and is lost with a death. What uses it, as clip_grad_norm_() over "
                "all parameters, then gives another result than undisturbed. Freeze it (requires_grad_(False)), or end each "
                "step with model.zero_grad().",
                RuntimeWarning,
                stacklevel=5,
            )

    def _outside(self) -> list[tuple[str, Any]]:
        own = {id(parameter) for parameter in parameters_of(self._optimizer)}
        return [(name, parameter) for name, parameter in self._module.named_parameters() if id(parameter) not in own]


def _left(parameter: Any) -> bool:
    return parameter.grad is not None and bool(local(parameter.grad).any())
