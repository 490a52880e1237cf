"""What the engine leaves to the kind of job: replicas whose survivors go on, or stages that are replayed."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ftcomm.errors import ConfigError
from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.recovery.data import Share, Source
from ftcomm.recovery.engine.saved import RunState
from ftcomm.torch.optimizers import parameters_of

__all__ = ["Kind", "Setup", "check_parameters"]


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


def check_parameters(setup: Setup) -> None:
    """The optimizer has parameters of the model only: others are neither handed over nor saved with it, nor compared.

    Raises:
        ConfigError: it has others.
    """
    own = {id(parameter) for parameter in setup.model.parameters()}
    for number, parameter in enumerate(parameters_of(setup.optimizer)):
        if id(parameter) not in own:
            raise ConfigError(
                f"The optimizer's parameter {number} (shape {list(parameter.shape)}) is not in the model: a replacement would "
                "not get it, and no checkpoint would have it. Make it a parameter of the model: register it in the module before "
                "that is wrapped, or wrap a module that holds both. Copies that the optimizer was given in place of the model's "
                "own (master weights) can't be carried over failures."
            )


class Kind(ABC):
    """One job's way through the steps; each rank has one.

    Attributes:
        rank: of the job.
        alive: slots of the data that take part in the present step.
        state: of the run.
        step: what ``engine.step()`` gives; has ``offer``, ``before_update``, ``stepped``, ``inside``, ``undecided``,
            ``dropped``.
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
    def meet(self, epochs: int) -> None:
        """A step is about to begin, or the loop of so many epochs is over: who is there?"""

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
