"""What a checkpoint of a run holds, in plain types that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

from typing import Any

from ftcomm.errors import ConfigError

__all__ = ["pack", "unpack"]


def pack(module: Any, optimizer: Any, state: dict[str, Any], buckets: list[list[int]] | None) -> dict[str, Any]:
    """``{"model": state_dict, "optimizer": state_dict, "state": {name: state_dict or value}, "buckets": DDP's}``"""
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "state": {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()},
        "buckets": buckets,
    }


def unpack(saved: dict[str, Any], module: Any, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Loads what :func:`pack` has made; returns ``state`` with the saved plain values.

    Raises:
        ConfigError: the checkpoint is of another script: it has other names.
    """
    if {*saved["state"]} != {*state}:
        odd = ", ".join(sorted({*saved["state"]} ^ {*state}))
        raise ConfigError(f"The checkpoint and this script do not have the same state ({odd}): it is of another run.")
    module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    found = {}
    for name, value in saved["state"].items():
        mine = state[name]
        if hasattr(mine, "load_state_dict"):
            mine.load_state_dict(value)
        found[name] = mine if hasattr(mine, "load_state_dict") else value
    return found
