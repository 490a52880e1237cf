"""What a script switches in a model: dropout and batch norm to evaluation, parameters on and off. No state_dict() has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Modes"]


class Modes:
    """A replacement runs the script from its first line, and comes into a loop that may have switched something long ago."""

    def __init__(self, model: Any, module: Any) -> None:
        """``module``: what ``model`` is a wrapper of, or the model itself."""
        self._model, self._module = model, module

    def state_dict(self) -> dict[str, Any]:
        """The names of the modules that do not train, and of the parameters that do not."""
        return {
            "evaluating": [name for name, module in self._module.named_modules() if not module.training],
            "frozen": [name for name, parameter in self._module.named_parameters() if not parameter.requires_grad],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        evaluating, frozen = {*state["evaluating"]}, {*state["frozen"]}
        for name, module in self._module.named_modules():
            module.training = name not in evaluating
        self._model.training = self._module.training
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(name not in frozen)
