"""Which source fits a loader."""

from __future__ import annotations

from typing import Any

from ftcomm.errors import ConfigError
from ftcomm.recovery.data.iterable_source import IterableSource, StatefulSource
from ftcomm.recovery.data.map_source import MapSource
from ftcomm.recovery.data.settings import MapSettings, is_map_loader
from ftcomm.recovery.data.source import Source

__all__ = ["make_source"]


def make_source(
    loader: Any, rank: int, slots: int, *, keep_batch: bool, seed: int | None = None, reseed: bool = True
) -> Source:
    """The source of the batches of one rank.

    Args:
        loader: a torch DataLoader over a map-style dataset, whose samples are dealt out (:class:`MapSource`); or an iterable with
            ``state_dict()`` and ``load_state_dict()``, as torchdata's StatefulDataLoader (:class:`StatefulSource`); or any other
            iterable of batches (:class:`IterableSource`).
        rank: this rank's slot, 0 to ``slots - 1``.
        slots: ranks of the job, dead ones too.
        keep_batch: the samples of dead slots are computed by the others in the same step. Only with the first kind of loader.
        seed: the same on all ranks; the order of samples has that of a DistributedSampler. None: that one for all, or 0.
        reseed: see :class:`MapSource`.

    Raises:
        ConfigError: the loader's samples cannot be dealt out, or not with ``keep_batch``.
    """
    if not 0 <= rank < slots:
        raise ConfigError(f"rank={rank!r} must be from 0 to {slots - 1}: the job has {slots} slots.")
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulSource(loader, rank, slots, keep_batch=keep_batch, seed=seed)
    if is_map_loader(loader):
        return MapSource(MapSettings.of(loader, slots), rank, slots, keep_batch=keep_batch, seed=seed, reseed=reseed)
    return IterableSource(loader, rank, slots, keep_batch=keep_batch, seed=seed)
