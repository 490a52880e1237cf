"""Random numbers of the loading: from seeds of their own, and the script's generators are as before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["PrivateRng", "SeededDataset", "WorkerInit", "kept_rng", "mixed", "seed_all"]

_MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """A seed below 2**63 made of whole numbers: splitmix64, so that (1, 0) and (0, 1) have nothing in common.

    Its low 32 bits are mixed as well as the others: NumPy's and torch's generators take no more of a seed.
    """
    z = 0
    for number in numbers:
        z = (z + number + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z >> 1


def seed_all(seed: int) -> None:
    """The global CPU generators. Not ``torch.manual_seed``: it visits every kind of device, which takes 100 times as long."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def _now() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def _put(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@contextlib.contextmanager
def kept_rng() -> Iterator[None]:
    """Whatever is drawn within, the global CPU generators of Python, NumPy and torch are as before afterwards."""
    before = _now()
    try:
        yield
    finally:
        _put(before)


class PrivateRng:
    """While it is entered the global CPU generators go on where they stood when it was left; the script's are as before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, Any, Any] | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with kept_rng():
            if self._state is None:
                seed_all(self._seed)
            else:
                _put(self._state)
            try:
                yield
            finally:
                self._state = _now()

    def state(self) -> list[Any] | None:
        """Plain numbers, lists and a tensor."""
        if self._state is None:
            return None
        (version, words, gauss), numpy, state = self._state
        key = [int(word) for word in numpy["state"]["key"]]
        numbers = [int(numpy["state"]["pos"]), int(numpy["has_gauss"]), float(numpy["gauss"])]
        return [version, list(words), gauss, numpy["bit_generator"], key, numbers, state]

    def load(self, state: list[Any] | None) -> None:
        if state is None:
            self._state = None
            return
        version, words, gauss, name, key, (position, has_gauss, numpy_gauss), tensor = state
        numpy = {
            "bit_generator": name,
            "state": {"key": np.array(key, np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": numpy_gauss,
        }
        self._state = ((version, tuple(words), gauss), numpy, tensor)


class SeededDataset:
    """A map-style dataset whose random augmentations depend on seed, epoch and sample only: not on workers, deaths or restarts.

    It is asked for keys ``(epoch, index)``, so that workers which live for several epochs know which one it is. Before each
    sample the global CPU generators of Python, NumPy and torch are seeded, about 11 us together; they are not put back, which is
    what :func:`kept_rng` is for in the script's own process (about 0.1 ms for a batch). Of a dataset with ``__getitems__`` all
    samples of a call are drawn with the seed of its first. Generators of the dataset's own and those of devices are not reached.
    """

    def __init__(self, inner: Any, seed: int, reseed: bool) -> None:
        self.inner = inner
        self._seed = seed
        self._reseed = reseed

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        self._begin(key)
        return self.inner[key[1]]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        if getattr(self.inner, "__getitems__", None):
            self._begin(keys[0])
            return self.inner.__getitems__([index for _, index in keys])
        return [self[key] for key in keys]

    def _begin(self, key: tuple[int, int]) -> None:
        if self._reseed:
            seed_all(mixed(self._seed, *key))


class WorkerInit:
    """In a worker: ``get_worker_info().dataset`` is the script's dataset, as its own ``worker_init_fn`` expects."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        info = torch.utils.data.get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.inner)  # it is made read-only
        if self._inner is not None:
            self._inner(worker)
