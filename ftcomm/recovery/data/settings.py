"""What a torch DataLoader over a map-style dataset was told, and which ones cannot be dealt out anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils.data as data
from torch.utils.data.distributed import DistributedSampler

from ftcomm.errors import ConfigError

__all__ = ["MapSettings", "is_map_loader"]

_ELSE = (
    "Use shuffle=True, shuffle=False or a DistributedSampler, with which each sample is used once across deaths; or wrap the "
    "loader in an iterable of your own, whose batches are taken as they come: what a dead rank should have computed is lost then."
)


def is_map_loader(loader: Any) -> bool:
    """A DataLoader that iterates as torch's does, over a dataset that can be asked for any sample."""
    if not isinstance(loader, data.DataLoader) or type(loader).__iter__ is not data.DataLoader.__iter__:
        return False
    return not isinstance(loader.dataset, data.IterableDataset)


@dataclass(frozen=True)
class MapSettings:
    """Of the script's loader. ``workers`` are arguments for another DataLoader with worker processes; empty: there are none."""

    dataset: Any
    samples: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int | None
    collate: Callable[[Any], Any]
    pin_memory: bool
    workers: dict[str, Any]
    worker_init_fn: Any

    @staticmethod
    def of(loader: Any, slots: int) -> MapSettings:
        """Raises ConfigError if the loader draws its samples in a way that is not known."""
        dataset, sampler = loader.dataset, loader.sampler
        if loader.batch_size is None:
            if loader.batch_sampler is None:
                raise ConfigError(
                    "A DataLoader with batch_size=None makes no batches, so that they cannot be dealt out. Set it."
                )
            raise ConfigError(
                f"The batch_sampler {type(loader.batch_sampler).__name__} cannot be dealt out to others. {_ELSE}"
            )
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"{type(dataset).__name__} has no __len__: nobody knows when an epoch of it is over. Add one."
            )
        samples = len(dataset)
        if samples == 0:
            raise ConfigError(f"{type(dataset).__name__} is empty: its length is 0. Is the path to the data right?")
        shuffle, seed, drop_last = _order(sampler, samples, slots)
        workers: dict[str, Any] = {}
        if loader.num_workers:
            names = (
                "num_workers",
                "prefetch_factor",
                "persistent_workers",
                "multiprocessing_context",
                "timeout",
                "pin_memory",
            )
            workers = {name: getattr(loader, name) for name in names}
        return MapSettings(
            dataset=dataset,
            samples=samples,
            batch_size=loader.batch_size,
            shuffle=shuffle,
            drop_last=loader.drop_last or drop_last,
            seed=seed,
            collate=loader.collate_fn,
            pin_memory=loader.pin_memory and torch_can_pin(),
            workers=workers,
            worker_init_fn=loader.worker_init_fn,
        )


def torch_can_pin() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


def _order(sampler: Any, samples: int, slots: int) -> tuple[bool, int | None, bool]:
    """(shuffle, seed, drop_last). Subclasses are others: what they do besides is not known."""
    kind, name = type(sampler), type(sampler).__name__
    if kind is data.SequentialSampler:
        found: tuple[bool, int | None, bool] = (False, None, False)
        sampled = len(sampler.data_source)
    elif kind is data.RandomSampler and not sampler.replacement:
        found, sampled = (True, None, False), sampler.num_samples
    elif kind is data.RandomSampler:
        raise ConfigError(f"A RandomSampler with replacement uses samples more than once. {_ELSE}")
    elif kind is DistributedSampler:
        if sampler.num_replicas != slots:
            raise ConfigError(
                f"The DistributedSampler is for num_replicas={sampler.num_replicas}, and the job has {slots} slots. Make it for "
                f"{slots}, or use shuffle=True instead: the samples are dealt out anyhow."
            )
        found, sampled = (sampler.shuffle, sampler.seed, sampler.drop_last), len(sampler.dataset)
    else:
        raise ConfigError(
            f"The sampler {name} is not known, so that its samples cannot be dealt out to others. {_ELSE}"
        )
    if sampled != samples:
        raise ConfigError(f"The {name} draws {sampled} samples, and the dataset has {samples}. {_ELSE}")
    return found
