"""What the engine leaves to the kind of job: replicas whose survivors go on, or stages that are replayed."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.recovery.data import Share, Source
from ftcomm.recovery.engine.saved import RunState

__all__ = ["Kind", "Setup"]


@dataclass(frozen=True)
class Setup:
    """What the script gave the engine, checked."""

    model: Any
    optimizer: Any
    schedulers: list[Any]
    scaler: Any
    extra: dict[str, Any] | None
    checkpoint_dir: Any
    keep: int
    every: int
    seed: int | None
    patience: float
    keep_batch: bool
    schedule: Any = None  # of a pipeline, whose replayed steps the ranks share


class Kind(ABC):
    """One job's way through the steps; each rank has one.

    Attributes:
        rank: of the job.
        alive: slots of the data that take part in the present step.
        state: of the run.
        step: what ``engine.step()`` gives; has ``offer``, ``before_update``, ``stepped``, ``inside`` and ``dropped``.
        folder: of this rank's checkpoints; None: there are none.
    """

    rank: int
    alive: tuple[int, ...]
    state: RunState
    step: Any
    folder: CheckpointFolder | None

    @abstractmethod
    def source(self, loader: Iterable[Any]) -> Source:
        """Of this rank's batches."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Entered for the time of the loop."""
        return contextlib.nullcontext()

    @abstractmethod
    def resume(self) -> None:
        """The loop begins."""

    @abstractmethod
    def meet(self) -> None:
        """A step is about to begin: who is there?"""

    @abstractmethod
    def offer(self, share: Share) -> None:
        """Its batch is about to be given out."""

    @abstractmethod
    def settle(self) -> frozenset[int] | None:
        """The body is over: slots whose samples are in the step; None: it was dropped, and the batch is given again."""

    @abstractmethod
    def committed(self) -> None:
        """One more step is a part of the run: is a checkpoint due?"""

    @abstractmethod
    def finish(self) -> None:
        """No step is left: the last checkpoint."""
