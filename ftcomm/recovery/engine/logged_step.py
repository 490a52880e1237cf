"""One step under the policy replay: it is always committed, by a replacement if need be."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from ftcomm.errors import ConfigError

__all__ = ["LoggedStep"]


class LoggedStep:
    """The context manager around one batch's step. Nothing is ever put back: who dies in it does it again, from the logs.

    Args:
        on_update: called before each update of the optimizer.

    Attributes:
        stepped: the batch has had its step.
        inside: in the body.
        updated: the optimizer has made an update in the last one.
        dropped, undecided: never.
    """

    dropped = undecided = False

    def __init__(self, on_update: Callable[[], None] = lambda: None) -> None:
        self._on_update = on_update
        self.inside = self.updated = False
        self.stepped = True  # before the first batch

    def offer(self) -> None:
        """The next batch is about to be given out."""
        self.stepped = False

    def __enter__(self) -> None:
        if self.inside:
            raise ConfigError("engine.step() is inside another one.")
        if self.stepped:
            raise ConfigError("Each batch of engine.steps() has one engine.step().")
        self.inside, self.stepped, self.updated = True, True, False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inside = False

    def before_update(self, _: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        """The optimizer's hook. An update that comes after the loop has gone on would be in no checkpoint."""
        if not self.inside:
            raise ConfigError("optimizer.step() was called outside of `with engine.step():`.")
        self._on_update()
        self.updated = True
