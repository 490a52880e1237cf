"""What the ftruns of several nodes write for each other in the rendezvous store."""

from __future__ import annotations

from torch.distributed import Store


class Board:
    """All of it has one prefix, and who writes what others have to look at counts it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def read(self, key: str) -> str | None:
        return self.wait_for(key) if self.store.check([_key(key)]) else None

    def wait_for(self, key: str) -> str:
        """Until somebody has written it. DistError: nobody has, for as long as the store waits, or the store is gone."""
        return str(self.store.get(_key(key)).decode())

    def write(self, key: str, value: str) -> None:
        self.store.set(_key(key), value)

    def replace(self, key: str, before: str, value: str) -> str:
        """Writes it where there is ``before`` (empty: nothing). Returns what is there then."""
        return str(self.store.compare_set(_key(key), before, value).decode())

    def count(self, key: str, more: int = 1) -> int:
        return int(self.store.add(_key(key), more))

    def tell(self) -> None:
        """The others are to look."""
        self.count("news")

    def news(self) -> int:
        """How often anybody was told."""
        return self.count("news", 0)


def _key(name: str) -> str:
    return f"ftrun/{name}"
