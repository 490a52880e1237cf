"""Between a dropped step and its repetition schedulers and settings stay as they were put back."""

from __future__ import annotations

from typing import Any

import torch

from ftcomm.errors import ConfigError
from ftcomm.recovery.engine.restorable import copied

__all__ = ["Schedules"]


class Schedules:
    """Schedulers, and the optimizer's settings, which they change.

    A script that steps a scheduler after the step and not in it does so for a dropped one, too, and again when that is repeated.
    """

    def __init__(self, optimizer: Any, schedulers: list[Any]) -> None:
        self._optimizer, self._schedulers = optimizer, schedulers
        self._kept: Any = None

    def keep(self) -> None:
        """A step was dropped, and all was put back."""
        self._kept = copied(self._now())

    def check(self, last: bool = False) -> None:
        """``last``: the next step begins.

        Raises:
            ConfigError: something is not as it was put back.
        """
        kept = self._kept
        if last:
            self._kept = None
        if kept is None or _same(kept, self._now()):
            return
        raise ConfigError(
            "A step was dropped, and before its repetition the script has changed a scheduler or the optimizer's settings: they "
            "would be changed twice for one step. Step schedulers inside of `with engine.step():`, where a drop puts them back, "
            "or only `if engine.committed:`."
        )

    def _now(self) -> list[Any]:
        groups = self._optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return [settings, [scheduler.state_dict() for scheduler in self._schedulers]]


def _same(one: Any, other: Any) -> bool:
    """What can't be compared is taken for the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    plain = (int, float, str, bool, type(None))
    if isinstance(one, plain) and isinstance(other, plain):
        return one == other or (one != one and other != other)  # nan is no change
    return True
