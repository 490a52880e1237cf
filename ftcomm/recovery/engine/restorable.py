"""What a step has to put back when it is dropped, and its random numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ftcomm.recovery.data.seeded import mixed, seed_all

__all__ = ["Restorable", "copied", "reseed"]

_OF_STEPS = 1  # else step 3 of rank 5 would draw what the loading of sample 5 draws in epoch 3


class Restorable:
    """What a step changes before its update: buffers, gradients, schedulers, a gradient scaler.

    Parameters and optimizer state are not in here: an update begins only when it is known that it will be finished by all.
    """

    def __init__(self, module: Any, optimizers: list[Any], schedulers: list[Any], scaler: Any) -> None:
        self._module, self._optimizers, self._schedulers, self._scaler = module, optimizers, schedulers, scaler
        self._buffers: list[tuple[Any, Any]] = []  # each with a copy

    @property
    def scaled(self) -> bool:
        """Whether there is a gradient scaler."""
        return self._scaler is not None

    def save(self) -> None:
        """As it is now, at the begin of a step."""
        buffers = list(self._module.buffers())
        if [b.data_ptr() for b in buffers] != [b.data_ptr() for b, _ in self._buffers]:
            self._buffers = [(b, torch.empty_like(b)) for b in buffers]
        if buffers:
            with torch.no_grad():
                torch._foreach_copy_([copy for _, copy in self._buffers], buffers)
        self._schedules = [copied(scheduler.state_dict()) for scheduler in self._schedulers]
        self._settings = [
            [
                {key: copied(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        self._scale = None if self._scaler is None else dict(self._scaler.state_dict())

    def restore(self) -> None:
        """As it was at the begin of the step; gradients are gone."""
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_([buffer for buffer, _ in self._buffers], [copy for _, copy in self._buffers])
        for parameter in self._module.parameters():
            parameter.grad = None
        for scheduler, state in zip(self._schedulers, self._schedules, strict=True):
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(self._optimizers, self._settings, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for key, value in settings.items():
                    if isinstance(
                        value, torch.Tensor
                    ):  # a learning rate, which compiled optimizers know by its address
                        group[key].copy_(value)
                    else:
                        group[key] = value
        if self._scaler is not None and self._scale:
            self._scaler.load_state_dict(self._scale)
            # unscale_() may have been called, and would be refused when the step is done again.
            fresh = torch.amp.grad_scaler._refresh_per_optimizer_state
            self._scaler._per_optimizer_states = defaultdict(fresh)
            # A fused optimizer divides by the scale itself. The scaler hands it over here, takes it back only after a step, and
            # would multiply what it finds when the step is done again.
            for optimizer in self._optimizers:
                for name in ("grad_scale", "found_inf"):
                    vars(optimizer).pop(name, None)


def copied(value: Any) -> Any:
    """Tensors, too: schedulers write a learning rate that is a tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def reseed(seed: int, step: int, rank: int) -> None:
    """Sets the global generators of Python, NumPy and torch, for devices in use as well."""
    number = mixed(seed, step, rank, _OF_STEPS)
    seed_all(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
