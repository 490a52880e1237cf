"""A store inside one process: for world size 1 and for tests with threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ftcomm.stores import Store

__all__ = ["MemoryStore"]


class MemoryStore(Store):
    """A dict with a condition variable."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def get(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._changed:
            if self._values.get(key, b"") == expected:
                self._values[key] = desired
                self._changed.notify_all()
            return self._values.get(key, b"")

    def wait(self, keys: Sequence[str], timeout: float) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout)
            return [key for key in keys if key not in self._values]
