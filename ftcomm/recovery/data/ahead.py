"""Worker processes that load the coming steps, as far as they can be foreseen."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ftcomm.recovery.data.seeded import SeededDataset, WorkerInit, mixed
from ftcomm.recovery.data.settings import MapSettings
from ftcomm.recovery.data.shares import Shares

__all__ = ["Ahead"]


class Ahead:
    """One slot's batches, loaded in workers as if those who are alive now stayed so.

    It is torch's DataLoader over a batch sampler that plans with a copy of the shares. A death or a join makes some of the
    batches under way the wrong ones; :meth:`take` says so, and those after them are right again. No worker is started for that.

    Args:
        shares: the source's own; read only.
        empty: the indexes to load where the slot has none.
    """

    def __init__(
        self, settings: MapSettings, dataset: SeededDataset, shares: Shares, rank: int, empty: Sequence[int]
    ) -> None:
        self._shares = shares
        self._rank = rank
        self._empty = list(empty)
        self._alive: tuple[int, ...] = ()
        self._plan: Shares | None = None  # None: no longer what is to be expected
        self._under_way: collections.deque[tuple[int, list[int]]] = collections.deque()
        self._iterator: Any = None
        # With one of its own: DataLoader draws a seed for the workers, from the global one if there is none.
        self._generator = torch.Generator()
        self._no_batches = False
        # To DataLoader they are persistent always: only those can be started before it is known what they are to load.
        workers = dict(settings.workers)
        self._persistent = workers.pop("persistent_workers")
        self._loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=_Sampler(self),
            collate_fn=settings.collate,
            worker_init_fn=WorkerInit(settings.worker_init_fn),
            generator=self._generator,
            persistent_workers=True,
            **workers,
        )

    def expect(self, alive: Sequence[int]) -> None:
        """Who will take part from now on."""
        if self._alive != tuple(sorted(alive)):
            self._alive = tuple(sorted(alive))
            self._plan = None

    def surprise(self) -> None:
        """A step did not go as planned: other samples wait now."""
        self._plan = None

    def warm(self) -> None:
        """Starts the workers, with nothing to load yet."""
        self._no_batches = True
        self._iterate()
        self._no_batches = False

    def _iterate(self) -> Any:
        self._generator.manual_seed(mixed(self._shares.seed, self._shares.epoch, self._rank))
        return iter(self._loader)

    def take(self, step: int, indexes: list[int]) -> tuple[bool, Any]:
        """(True, the batch) if just these indexes were loaded for this step; waits for the workers then."""
        if self._iterator is None:
            self._iterator = self._iterate()
        while self._under_way and self._under_way[0][0] < step:
            self._under_way.popleft()
            # Nobody wants that batch: an error of the dataset in it is of no concern, and one of the workers comes again.
            with contextlib.suppress(Exception):
                next(self._iterator)
        if not self._under_way or self._under_way[0] != (step, indexes):
            return False, None  # and it stays: a retry may want it
        self._under_way.popleft()
        return True, next(self._iterator)

    def restart(self) -> None:
        """At another epoch or step than the one after the last; what is under way is thrown away."""
        if self._iterator is not None and not self._persistent:
            self._iterator._shutdown_workers()
            self._loader._iterator = None
        self._iterator = None
        self._under_way.clear()
        self._plan = None

    def close(self) -> None:
        if self._iterator is None:
            self._iterator = self._loader._iterator  # of persistent workers after restart(), or warm() only
        if self._iterator is not None:
            self._iterator._shutdown_workers()
        self._iterator = self._loader._iterator = None
        self._under_way.clear()

    def planned(self) -> Iterator[list[tuple[int, int]]]:
        """The indexes of each step from the present one on; DataLoader asks for the next when it hands one to a worker."""
        if self._no_batches:
            return
        self._under_way.clear()
        self._plan = None
        step = self._shares.step
        while True:
            if self._plan is None:
                self._plan = self._shares.copy()
            plan = self._plan
            while plan.step < step and not plan.finished:
                plan.commit(self._alive, self._alive)
            if plan.finished:
                return
            indexes = plan.indexes(plan.parts(self._alive)[self._rank]) or self._empty
            self._under_way.append((step, indexes))
            yield [(plan.epoch, index) for index in indexes]
            step += 1


class _Sampler:
    """DataLoader iterates its batch sampler once for each epoch, or restart."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._ahead.planned()
