"""Datasets that say where and how often they were asked, and a job of several data sources in one process."""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from ftcomm.recovery.data import Share, make_source


class Noisy:
    """Sample i is [i, the process that loaded it] and random numbers of each generator."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.asked: list[int] = []  # in this process

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        self.asked.append(i)
        if not 0 <= i < self.samples:
            raise IndexError(i)
        noise = [random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([i, os.getpid()]), torch.tensor(noise, dtype=torch.float64)


class Together(Noisy):
    """Has ``__getitems__``, as datasets have that read many samples at a time."""

    def __getitems__(self, indexes: list[int]) -> list[Any]:
        return [super(Together, self).__getitem__(i) for i in indexes]

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("samples were asked for one by one")


def indexes(share: Share) -> list[int]:
    return share.batch[0][:, 0].tolist() if share.samples else []


def pids(share: Share) -> set[int]:
    return set(share.batch[0][:, 1].tolist())


def noise(share: Share) -> dict[int, tuple[float, ...]]:
    """Sample -> its random numbers."""
    return dict(zip(indexes(share), map(tuple, share.batch[1][: share.samples].tolist()), strict=True))


def generators() -> tuple[Any, ...]:
    """Where the script's generators stand."""
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], bytes(torch.get_rng_state().numpy())


class Job:
    """One source for each living slot, driven in lockstep as the engine does.

    Attributes:
        used: how often each sample was committed in the present epoch.
        noise: sample -> random numbers of it in the present epoch.
    """

    def __init__(self, make_loader: Any, slots: int, **options: Any) -> None:
        self.make = lambda rank: make_source(make_loader(), rank, slots, **options)
        self.sources = {slot: self.make(slot) for slot in range(slots)}
        self.used: collections.Counter[int] = collections.Counter()
        self.noise: dict[int, tuple[float, ...]] = {}

    @property
    def alive(self) -> list[int]:
        return sorted(self.sources)

    def draw(self) -> dict[int, Share] | None:
        shares = {slot: source.draw(self.alive) for slot, source in self.sources.items()}
        if None in shares.values():
            assert set(shares.values()) == {None}, "the ranks disagree about the epoch's end"
            return None
        assert len({share.total for share in shares.values()}) == 1
        assert sum(share.samples for share in shares.values()) == next(iter(shares.values())).total
        return shares  # type: ignore[return-value]

    def commit(self, shares: dict[int, Share], contributed: Collection[int]) -> None:
        for slot in contributed:
            self.used.update(indexes(shares[slot]))
            for index, drawn in noise(shares[slot]).items():
                assert self.noise.setdefault(index, drawn) == drawn
        for source in self.sources.values():
            source.commit(contributed)
        states = [source.state_dict() for source in self.sources.values()]
        assert all(state == states[0] for state in states)

    def next_epoch(self) -> None:
        self.used.clear()
        self.noise.clear()
        for source in self.sources.values():
            source.next_epoch()

    def die(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.sources.pop(slot).close()

    def join(self, slot: int) -> None:
        state = self.sources[self.alive[0]].state_dict()
        self.sources[slot] = self.make(slot)
        self.sources[slot].load_state_dict(state)

    def close(self) -> None:
        self.die(self.alive)
