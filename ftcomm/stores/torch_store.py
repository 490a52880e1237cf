"""Any torch Store (TCPStore, FileStore, HashStore, PrefixStore, ...) as ours."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ftcomm.stores import Store

__all__ = ["TorchStore"]


class TorchStore(Store):
    """Holds the store for as long as the job lives.

    A store that can clone itself is cloned: one connection serves one call at a time, and membership decisions must not
    queue behind a wait of the training script.
    """

    def __init__(self, store: Any) -> None:
        self.torch_store = store
        try:
            self._store = store.clone()
        except (AttributeError, RuntimeError):  # not in every kind of store
            self._store = store

    def get(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        # torch answers with `expected` itself when the key is missing and `expected` is not empty.
        after = bytes(self._store.compare_set(key, expected, desired))
        if expected and after == expected and not self._store.check([key]):
            return b""
        return after

    def wait(self, keys: Sequence[str], timeout: float) -> list[str]:
        try:
            self._store.wait(list(keys), timedelta(seconds=max(timeout, 0.001)))
        except Exception:
            missing = [key for key in keys if not self._store.check([key])]
            if not missing:
                return []
            if timeout > 0 and not self._timed_out(missing[0]):
                raise
            return missing
        return []

    def _timed_out(self, key: str) -> bool:
        """Whether the store still answers: then the wait ended by its time, not by a lost connection."""
        self._store.check([key])
        return True
