"""Loaders whose samples cannot be dealt out to others: torchdata's stateful one, and anything that can be iterated."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ftcomm.errors import Closed, ConfigError, Unsupported
from ftcomm.recovery.data.seeded import PrivateRng, mixed
from ftcomm.recovery.data.source import Share, Source, of_another

__all__ = ["IterableSource", "StatefulSource"]


class IterableSource(Source):
    """Takes the batches as they come, one for each step.

    A loader gives each rank other samples, so that a survivor's place in it is of no use to a replacement. The state is what all
    ranks have in common, epoch and step. A rank that loads it iterates that many batches of the epoch and throws them away, which
    takes as long as loading them did. What a slot should have computed in a step that it did not contribute to is lost;
    ``lost_steps`` counts that.

    All ranks must have the same number of batches in an epoch: each one ends it when its own loader ends. ``iter(loader)`` must
    give the same batches again in a replacement. For that a ``set_epoch(epoch)`` of the loader, its dataset or its samplers is
    called before each epoch, and everything that iterating draws from the global CPU generators in this process comes from seed,
    epoch and rank; the script's generators do not notice (about 0.2 ms for a batch). Workers get their seeds from there when they
    start: with ``persistent_workers`` a replacement has the same samples, but not the same random numbers in them.

    A share counts batches, not samples: ``samples`` is 1 and ``total`` the number of living slots.

    Attributes:
        lost_steps: slot -> steps, of all epochs, that its samples are not in.
    """

    def __init__(self, loader: Any, rank: int, slots: int, *, keep_batch: bool, seed: int | None = None) -> None:
        name = type(loader).__name__
        if keep_batch:
            raise Unsupported(
                f"keep_batch=True has others compute a dead rank's samples, which {name} cannot give them. Use a torch "
                "DataLoader over a map-style dataset, or keep_batch=False."
            )
        if not hasattr(loader, "__iter__"):
            raise ConfigError(f"A data source is made of a DataLoader or another iterable of batches, not of {name}.")
        if hasattr(loader, "__next__"):
            raise ConfigError(
                f"{name} can be iterated only once, and each epoch and each replacement begins anew. Use an iterable."
            )
        self.epoch = self.step = 0
        self.lost_steps: dict[int, int] = {}
        self._loader = loader
        self._rank = rank
        self._slots = slots
        self._seed = seed or 0
        self._rng: PrivateRng | None = None
        self._iterator: Iterator[Any] | None = None
        self._hand: list[Any] = []  # the batch of the present step, if it is drawn
        self._alive: list[int] | None = None
        self._ended = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def lost_batches(self) -> int:
        return sum(self.lost_steps.values())

    def ended(self) -> bool:
        if not self._hand and not self._ended:
            self._begin()
            self._hand = self._next()
            self._ended = not self._hand
        return self._ended

    def draw(self, alive: Sequence[int]) -> Share | None:
        if self._closed:
            raise Closed("The data source was closed: nothing can be drawn from it.")
        living = sorted(set(alive))
        if len(living) != len(alive) or not set(living) <= set(range(self._slots)) or self._rank not in living:
            raise ConfigError(
                f"alive={list(alive)!r} must be different slots of 0 to {self._slots - 1}, slot {self._rank} among them."
            )
        if self.ended():
            return None
        self._alive = living
        return Share(self._hand[0], 1, len(living), False)

    def commit(self, contributed: Collection[int]) -> None:
        if self._alive is None:
            raise ConfigError("commit() ends the step that draw() began, and there is none. Call draw() first.")
        if strangers := sorted(set(contributed) - set(self._alive)):
            raise ConfigError(f"The slots {strangers} contributed to a step that only {self._alive} had a share of.")
        for slot in sorted(set(range(self._slots)) - set(contributed)):
            self.lost_steps[slot] = self.lost_steps.get(slot, 0) + 1
        self.step += 1
        self._hand, self._alive = [], None

    def next_epoch(self) -> None:
        if not self._ended:
            raise ConfigError(
                f"Epoch {self.epoch} is not over: {self.step} steps are done. Go on until there is no step left."
            )
        self._go_to(self.epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "slots": self._slots,
            "seed": self._seed,
            "epoch": self.epoch,
            "step": self.step,
            "lost_steps": {slot: self.lost_steps[slot] for slot in sorted(self.lost_steps)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in (("slots", self._slots), ("seed", self._seed)):
            if state.get(name) != mine:
                raise ConfigError(of_another(name, state.get(name), mine, "the batches"))
        lost = {int(slot): int(steps) for slot, steps in state["lost_steps"].items()}
        self._go_to(state["epoch"], state["step"])
        self.lost_steps = lost

    def close(self) -> None:
        self._closed = True
        self._hand = []
        self._stop(for_good=True)

    def _go_to(self, epoch: int, step: int) -> None:
        self._stop(for_good=False)
        self.epoch, self.step = epoch, step
        self._hand, self._alive, self._ended = [], None, False

    def _stop(self, for_good: bool) -> None:
        """Ends the workers of the present iteration, those that persist only at the end."""
        iterator: Any = self._iterator
        self._iterator = None
        if for_good or not getattr(self._loader, "persistent_workers", False):
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
            if getattr(self._loader, "_iterator", None) is not None:
                self._loader._iterator = None

    def _begin(self) -> None:
        """Iterates to the present step, if that is not done."""
        if self._iterator is not None:
            return
        self._rng = PrivateRng(mixed(self._seed, self.epoch, self._rank))
        self._iterator = self._iterate(self._rng)
        for done in range(self.step):
            if not self._next():
                self._stop(for_good=False)
                raise ConfigError(
                    f"Epoch {self.epoch} ended after {done} batches, and {self.step} are done already. All ranks must have the "
                    "same number of batches, in a replacement too."
                )

    def _iterate(self, rng: PrivateRng) -> Iterator[Any]:
        samplers = (getattr(self._loader, name, None) for name in ("dataset", "sampler", "batch_sampler"))
        for part in (self._loader, *samplers):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self.epoch)
        with rng.entered():
            return iter(self._loader)

    def _next(self) -> list[Any]:
        """The next batch; nothing at the epoch's end. A batch may be None, which is why it is in a list."""
        assert self._rng is not None
        assert self._iterator is not None
        with self._rng.entered():
            try:
                return [next(self._iterator)]
            except StopIteration:
                return []


class StatefulSource(IterableSource):
    """With a loader that can save where it is, a rank that begins again from its own checkpoint throws no batches away.

    :meth:`local_state` is of one rank alone; the rest is as with any iterable, for replacements too. The samples are the same
    then; random numbers in them are so without workers only, since workers that begin in mid-epoch have other seeds.
    """

    _resumed: Mapping[str, Any] | None = None  # to be gone on from at the next draw

    def local_state(self) -> dict[str, Any]:
        """Where this rank's loader is. Raises ConfigError between :meth:`draw` and :meth:`commit`."""
        if self._hand:
            raise ConfigError(
                "The loader is past the batch of the present step already. Take its state after commit()."
            )
        if self._resumed is not None:
            return dict(self._resumed)
        state: dict[str, Any] = {"epoch": self.epoch, "step": self.step, "loader": None, "rng": None}
        if self._iterator is not None and self._rng is not None:
            with self._rng.entered():
                state["loader"] = self._loader.state_dict()
            state["rng"] = self._rng.state()
        return state

    def load_local_state(self, state: Mapping[str, Any]) -> None:
        """After :meth:`load_state_dict`. Raises ConfigError if the two are of different steps."""
        if (state["epoch"], state["step"]) != (self.epoch, self.step):
            raise ConfigError(
                f"The loader's state is of epoch {state['epoch']} and step {state['step']}, and the job is at epoch {self.epoch} "
                f"and step {self.step}. Leave it out: the loader is iterated to that step then."
            )
        self._go_to(self.epoch, self.step)
        self._resumed = state if state["loader"] is not None else None

    def _go_to(self, epoch: int, step: int) -> None:
        super()._go_to(epoch, step)
        self._resumed = None

    def _begin(self) -> None:
        if self._resumed is None:
            super()._begin()
            return
        self._loader.load_state_dict(self._resumed["loader"])
        self._iterator = self._iterate(PrivateRng(mixed(self._seed, self.epoch, self._rank)))
        self._rng = PrivateRng(0)
        self._rng.load(self._resumed["rng"])
        self._resumed = None
