"""Small key-value stores that the ranks of a job meet through, behind one interface (:class:`Store`).

``connect`` picks one by address; nothing here needs torch, but any torch Store can be used too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

__all__ = ["MAX_KEY", "MAX_VALUE", "Store"]

MAX_KEY = 1024
MAX_VALUE = 1 << 20


class Store(ABC):
    """Keys are text, values are bytes and never empty. All methods may be called from any thread.

    Attributes:
        durable: outlives the start of the job, so that it may hold membership decisions and let replacements in.
    """

    durable = True

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The value now, without waiting; None when there is none."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Writes the value, whatever was there."""

    @abstractmethod
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Writes ``desired`` if the key holds ``expected`` (``b""``: nothing); returns what it holds afterwards."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: float) -> list[str]:
        """Blocks until all keys exist or ``timeout`` seconds have passed; returns the keys that are missing."""

    def release(self) -> None:  # noqa: B027 - nothing to do for most
        """This rank has read all that it needs for the start: whoever hosts the store need not wait for it."""

    def close(self) -> None:  # noqa: B027
        """Lets go of descriptors and threads. A hosting rank waits here for others that are still starting."""
