"""What a model is: whether DistributedDataParallel is around it, and what its modules keep besides tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ddp_of", "ddps_in", "extra_states", "keeps_more", "set_extra_states", "unwrapped"]


def ddp_of(model: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a model is, also a compiled one; None: it is another module."""
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    return inner if isinstance(inner, DistributedDataParallel) else None


def ddps_in(model: Any) -> list[DistributedDataParallel]:
    """Those that are somewhere in a module: itself, what was compiled, stages in a ModuleList."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, DistributedDataParallel)]


def unwrapped(model: Any) -> Any:
    """The module that a DistributedDataParallel is around; another model itself."""
    ddp = ddp_of(model)
    return model if ddp is None else ddp.module


def keeps_more(module: Any) -> bool:
    """Whether there are any :func:`extra_states`."""
    return any(True for _ in _with_extra_state(module))


def extra_states(module: Any) -> dict[str, Any]:
    """By the name of the module: what state_dict() asks it for with get_extra_state()."""
    return {name: one.get_extra_state() for name, one in _with_extra_state(module)}


def set_extra_states(module: Any, states: dict[str, Any]) -> None:
    """Gives the modules what :func:`extra_states` has found, as load_state_dict() does."""
    for name, one in _with_extra_state(module):
        if name in states:
            one.set_extra_state(states[name])


def _with_extra_state(module: Any) -> Iterator[tuple[str, Any]]:
    """Those that can take it back."""
    for name, one in module.named_modules():
        kind = type(one)
        if kind.get_extra_state is not nn.Module.get_extra_state and (
            kind.set_extra_state is not nn.Module.set_extra_state
        ):
            yield name, one
