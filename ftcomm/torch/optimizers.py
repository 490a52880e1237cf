"""An optimizer's parameters, and its state loaded as it was saved."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["load_optimizer", "parameters_of", "same_types"]


def load_optimizer(optimizer: Any, saved: dict[str, Any], alike: bool = True) -> None:
    """``optimizer.load_state_dict(saved)``, and each tensor keeps the type that it has in there.

    torch gives all floating-point state (but the step) its parameter's type. Some optimizers keep a part in another one, as
    NAdam and ASGD do with products and rates of any parameter but float32: they would go on with other numbers.

    Its groups stay the ones that they were, and so do tensors in them, such as a learning rate: torch puts others in their
    places, and a script that keeps ``optimizer.param_groups``, or one of them, would go on writing to those that nobody reads.

    Args:
        alike: the parameters have the types that they had when it was saved. Else their state follows them, as with torch.
    """
    held = vars(optimizer).get("param_groups")
    optimizer.load_state_dict(saved)
    if held is not None and len(held) == len(optimizer.param_groups):
        _into(held, optimizer.param_groups)
        optimizer.param_groups = held
    if not alike:
        return
    parameters = parameters_of(optimizer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):  # load_state_dict() says if they do not fit
        loaded = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(number, {}).items():
            if name in loaded:
                loaded[name] = _as_saved(loaded[name], value, parameter.device)


def parameters_of(optimizer: Any) -> list[Any]:
    """In the order of its state_dict()."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def same_types(saved: dict[str, Any], own: dict[str, Any]) -> bool:
    """Of the tensors of two state dicts of a module."""
    return all(
        value.dtype == own[name].dtype
        for name, value in saved.items()
        if isinstance(value, torch.Tensor) and isinstance(own.get(name), torch.Tensor)
    )


def _into(held: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    written: set[int] = set()  # one tensor may be in several groups, and what was saved need not be
    for own, group in zip(held, loaded, strict=True):
        for name in own.keys() - group.keys():
            del own[name]
        for name, value in group.items():
            known: Any = own.get(name)
            if _fits(known, value) and (id(known) not in written or torch.equal(known, value.to(known.device))):
                written.add(id(known))
                with torch.no_grad():
                    known.copy_(value)
            else:
                own[name] = value


def _fits(known: Any, value: Any) -> bool:
    both = isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor)
    return both and (known.shape, known.dtype) == (value.shape, value.dtype)


def _as_saved(loaded: Any, saved: Any, device: torch.device) -> Any:
    """What was loaded, with the saved tensor where that one's type has changed."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        cast = loaded.dtype != saved.dtype and loaded.shape == saved.shape
        return saved.to(device) if cast else loaded
    if type(loaded) is dict and isinstance(saved, dict):
        return {key: _as_saved(value, saved.get(key), device) for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(loaded)(_as_saved(*both, device) for both in zip(loaded, saved, strict=True))
    return loaded
