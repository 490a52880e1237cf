"""What the engine drives, whatever the loader is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Share", "Source", "of_another"]


def of_another(name: str, theirs: Any, mine: Any, others: str) -> str:
    """Why a state can't be loaded. ``others``: what would be others."""
    again = f"Deal the data out to {theirs} ranks again." if name == "slots" else f"Go on with {name}={theirs!r}."
    return f"The state is of {name}={theirs!r}, and here is {name}={mine!r}: {others} would be others. {again}"


@dataclass(frozen=True)
class Share:
    """What one rank computes in one step.

    The gradient of the step is the sum over the ranks of ``samples / total`` times the gradient of the rank's mean loss.

    Attributes:
        batch: as the loader's ``collate_fn`` made it. It is given again if the step is retried: do not write into it.
        samples: how many of ``batch`` count; 0 if ``filler``.
        total: of all living ranks in this step. At least 1.
        filler: this rank has no sample in this step. ``batch`` is one sample anyhow, so that the script's code runs; its
            gradients must get the weight 0.
    """

    batch: Any
    samples: int
    total: int
    filler: bool


class Source(ABC):
    """Batches of one rank, step by step.

    Attributes:
        epoch: counted from 0.
        step: of the epoch, the present one, which is not committed; counted from 0.
    """

    epoch: int
    step: int

    @property
    def lost_batches(self) -> int:
        """That the script never gets, as who should have had them is dead. The same on all ranks."""
        return 0

    def warm(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Starts worker processes before it is known where to go on, so that nobody has to wait for that later."""

    @abstractmethod
    def draw(self, alive: Sequence[int]) -> Share | None:
        """This rank's share of the present step; None: the epoch is over.

        Until :meth:`commit` it is the same step: called again, it gives the same batch object if this rank has the same samples,
        and else loads what it has now.

        Args:
            alive: the slots that take part in the step; the same on all of them.
        """

    @abstractmethod
    def ended(self) -> bool:
        """Whether the present epoch has no step left. A rank that can't know loads the next batch, which :meth:`draw` gives."""

    def place(self, epochs: int) -> int:
        """Of the present step, or of the end of an epoch, or of all: the same on all ranks that have as many batches."""
        if self.epoch >= epochs:
            return 3 * self.epoch + 2
        return 3 * self.epoch + (0 if not self.ended() else 1 if self.epoch + 1 < epochs else 2)

    @abstractmethod
    def commit(self, contributed: Collection[int]) -> None:
        """Ends the step that was drawn last.

        Args:
            contributed: the slots whose gradients are in it; the same on all ranks.
        """

    @abstractmethod
    def next_epoch(self) -> None:
        """Begins the next epoch. Raises ConfigError if :meth:`draw` has not said that this one is over."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; the same on all ranks, before the present step."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at the state's step. Raises ConfigError if it is of other data."""

    @abstractmethod
    def __len__(self) -> int:
        """Regular steps of an epoch. Raises TypeError if the loader does not know."""

    @abstractmethod
    def close(self) -> None:
        """Ends worker processes. Nothing can be drawn any more."""
