"""What a step has to put back when it is dropped, and its random numbers."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from ftcomm.recovery.data.seeded import mixed, seed_all
from ftcomm.torch.modules import extra_states, keeps_more, set_extra_states
from ftcomm.torch.optimizers import parameters_of

__all__ = ["Restorable", "copied", "reseed"]

_OF_STEPS = 1  # else step 3 of rank 5 would draw what the loading of sample 5 draws in epoch 3


class Restorable:
    """What a step changes before its update: buffers, extra state of modules, gradients, schedulers, a gradient scaler.

    Parameters and optimizer state are not in here: an update begins only when it is known that it will be finished by all.
    """

    def __init__(self, module: Any, optimizers: list[Any], schedulers: list[Any], scaler: Any) -> None:
        self._module, self._optimizers, self._schedulers, self._scaler = module, optimizers, schedulers, scaler
        self._places: list[tuple[Any, dict[str, Any]]] = []  # of buffers: a module's dictionary, and what was in it
        self._buffers: list[tuple[Any, Any]] = []  # each with a copy
        self._has_extra = keeps_more(module)

    @property
    def scaled(self) -> bool:
        """Whether there is a gradient scaler."""
        return self._scaler is not None

    def save(self) -> None:
        """As it is now, at the begin of a step."""
        self._save_buffers()
        # By itself, as it may be what the module goes on writing to; tensors of a graph have no deepcopy.
        self._extra = copy.deepcopy(copied(extra_states(self._module))) if self._has_extra else {}
        self._schedules = [copied(scheduler.state_dict()) for scheduler in self._schedulers]
        self._settings = [
            [
                {key: copied(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        self._scale = None if self._scaler is None else dict(self._scaler.state_dict())
        self._having = [p for optimizer in self._optimizers for p in parameters_of(optimizer) if p.grad is not None]

    def _save_buffers(self) -> None:
        """A forward pass may write to them, or put others in their places (``self.mean = ...``), also where there was none."""
        self._places = [(module._buffers, dict(module._buffers)) for module in self._module.modules()]
        held = {id(buffer): buffer for _, before in self._places for buffer in before.values() if buffer is not None}
        buffers = [*held.values()]
        if not _serve_again(self._buffers, buffers):
            self._buffers = [(buffer, torch.empty_like(buffer)) for buffer in buffers]
        if buffers:
            with torch.no_grad():
                torch._foreach_copy_([saved for _, saved in self._buffers], buffers)

    def _restore_buffers(self) -> None:
        for place, before in self._places:
            if [(name, id(buffer)) for name, buffer in place.items()] != [(name, id(b)) for name, b in before.items()]:
                place.clear()
                place.update(before)
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_([buffer for buffer, _ in self._buffers], [saved for _, saved in self._buffers])

    def restore(self) -> None:
        """As it was at the begin of the step; of gradients zeros are left, where there were any: see BetweenSteps."""
        self._restore_buffers()
        if self._has_extra:
            set_extra_states(self._module, self._extra)
        for parameter in self._module.parameters():
            parameter.grad = None
        for parameter in self._having:
            parameter.grad = torch.zeros_like(parameter)
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


def _serve_again(kept: list[tuple[Any, Any]], buffers: list[Any]) -> bool:
    """The copies are of these very buffers, and have room for them."""
    return len(kept) == len(buffers) and all(
        one is buffer and (saved.shape, saved.dtype, saved.device) == (one.shape, one.dtype, one.device)
        for (one, saved), buffer in zip(kept, buffers, strict=True)
    )


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
