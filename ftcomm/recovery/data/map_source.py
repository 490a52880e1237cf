"""A map-style dataset: any rank can load any sample, so that none is lost and none is used twice."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ftcomm.errors import Closed, ConfigError
from ftcomm.recovery.data.ahead import Ahead
from ftcomm.recovery.data.ranges import count
from ftcomm.recovery.data.seeded import SeededDataset, kept_rng
from ftcomm.recovery.data.settings import MapSettings
from ftcomm.recovery.data.shares import Shares
from ftcomm.recovery.data.source import Share, Source

__all__ = ["MapSource"]


class MapSource(Source):
    """Deals out the samples of a DataLoader's dataset; loads them with its collate function and as many workers.

    The loader itself is never iterated. Workers load ahead as if those who are alive stayed so. What they could not foresee is
    loaded by the training process itself, while training waits: after a death or a join the batches that were under way, at most
    ``num_workers * prefetch_factor`` of them (with ``keep_batch=False`` a death costs none: each slot keeps its own samples).

    Args:
        seed: of the augmentations, and of the order, unless the loader's DistributedSampler has one. None: that one, or 0.
        reseed: random numbers drawn in the dataset depend on seed, epoch and sample only, and the script's generators do not
            notice; see :class:`SeededDataset`. Without, a rank that was replaced or that retries draws other augmentations.
    """

    def __init__(
        self,
        settings: MapSettings,
        rank: int,
        slots: int,
        *,
        keep_batch: bool,
        seed: int | None = None,
        reseed: bool = True,
    ) -> None:
        order = settings.seed if settings.seed is not None else seed or 0
        seed = order if seed is None else seed
        self.shares = Shares(
            settings.samples,
            settings.batch_size,
            slots,
            shuffle=settings.shuffle,
            seed=order,
            drop_last=settings.drop_last,
            keep_batch=keep_batch,
        )
        self._settings = settings
        self._rank = rank
        self._reseed = reseed
        self._dataset = SeededDataset(settings.dataset, seed, reseed)
        self._empty = [min(rank, settings.samples - 1)]  # any sample does: it counts for nothing
        self._ahead = Ahead(settings, self._dataset, self.shares, rank, self._empty) if settings.workers else None
        self._alive: list[int] | None = None  # of the step that was drawn
        self._hand: tuple[list[int], Any] | None = None
        self._closed = False

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return self.shares.epoch

    @property
    def step(self) -> int:  # type: ignore[override]
        return self.shares.step

    def __len__(self) -> int:
        return self.shares.steps

    def warm(self) -> None:
        if self._ahead is not None:
            self._ahead.warm()

    def ended(self) -> bool:
        return self.shares.finished

    def draw(self, alive: Sequence[int]) -> Share | None:
        if self._closed:
            raise Closed("The data source was closed: nothing can be drawn from it.")
        if self._rank not in alive:
            raise ConfigError(f"Slot {self._rank} draws a batch, but only {list(alive)} are alive.")
        if self.shares.finished:
            return None
        parts = self.shares.parts(alive)
        mine = self.shares.indexes(parts[self._rank])
        wanted = mine or self._empty
        if self._hand is None or self._hand[0] != wanted:
            self._hand = None  # not two batches at a time
            self._hand = (wanted, self._load(alive, wanted))
        self._alive = list(alive)
        return Share(self._hand[1], len(mine), sum(map(count, parts.values())), not mine)

    def commit(self, contributed: Collection[int]) -> None:
        if self._alive is None:
            raise ConfigError("commit() ends the step that draw() began, and there is none. Call draw() first.")
        self.shares.commit(self._alive, contributed)
        if self._ahead is not None and set(contributed) != set(self._alive):
            self._ahead.surprise()
        self._alive = self._hand = None

    def next_epoch(self) -> None:
        self.shares.next_epoch()
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        return self.shares.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.shares.load_state_dict(state)
        self._restart()

    def close(self) -> None:
        self._closed = True
        self._hand = None
        if self._ahead is not None:
            self._ahead.close()

    def _restart(self) -> None:
        self._alive = self._hand = None
        if self._ahead is not None:
            self._ahead.restart()

    def _load(self, alive: Sequence[int], indexes: list[int]) -> Any:
        if self._ahead is not None:
            self._ahead.expect(alive)
            foreseen, batch = self._ahead.take(self.step, indexes)
            if foreseen:
                return batch
        with kept_rng() if self._reseed else contextlib.nullcontext():
            batch = self._settings.collate(self._dataset.__getitems__([(self.epoch, index) for index in indexes]))
        if not self._settings.pin_memory:
            return batch
        from torch.utils.data._utils.pin_memory import pin_memory

        return pin_memory(batch)
