"""Whoever looks at the nodes' places: which of them are free, and whether the run goes on without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from ftcomm.launch import places
from ftcomm.launch.places import Places, Watch


class Looker:
    """At two nodes of another host, once a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.places = Places(HashStore())
        for node in range(2):
            self.places.replace(f"tenant/{node}", "", "1 1 name elsewhere/1 1 1")
        self.watch = Watch(1)

    def look(self, seconds: int, *beating: int) -> None:
        for _ in range(seconds):
            for node in range(2):
                if node in beating:
                    self.places.beat(node)
                self.watch.look(self.places, node)
            self.now += 1.0


@pytest.fixture
def looker(monkeypatch: pytest.MonkeyPatch) -> Looker:
    return Looker(monkeypatch)


def test_one_is_lost(looker: Looker) -> None:
    looker.look(3, 0, 1)
    looker.look(int(places.SILENT), 1)
    assert looker.watch.free(0) is not None
    assert looker.watch.free(1) is None
    assert looker.watch.is_well(1)


def test_all_are_lost_at_once_and_one_is_seen_to_be_first(looker: Looker) -> None:
    """Its place is not taken: nobody would let that one in."""
    looker.look(3, 0, 1)
    looker.look(5, 1)  # a beat more
    looker.look(int(places.SILENT) - 5)
    assert looker.watch.free(0) is not None
    assert looker.watch.free(1) is None
    assert looker.watch.lives(1)
    assert not looker.watch.is_well(1)
