"""Workers that can't be started yet: the kernel refused one, as it had no memory or no more processes at that moment; or it is
not known whether they still are this ftrun's to start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ftcomm.launch.workers import Slot

FIRST, LONGEST = 0.5, 30.0  # seconds until the next try; twice as long after each
HELD = 5.0  # seconds
TRIES = 20  # in a row, of one slot: some eight minutes

Begin = Callable[[Slot], None]


@dataclass
class Refused:
    """What is to be tried again."""

    slot: Slot
    begin: Begin
    facts: dict[str, Any]  # of the event that tells of the start
    at: float  # on the monotonic clock


@dataclass
class Retries:
    """When which slot is tried again; the slots have no process meanwhile."""

    _refused: dict[int, Refused] = field(default_factory=dict)  # by rank
    _tries: dict[int, int] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)  # how often since it was last started

    def __bool__(self) -> bool:
        return bool(self._refused)

    def add(self, slot: Slot, begin: Begin, facts: dict[str, Any]) -> float | None:
        """The seconds until the next try; None after the last one."""
        tries = self._tries[slot.rank] = self._tries.get(slot.rank, 0) + 1
        if tries > TRIES:
            return None
        delay: float = min(LONGEST, FIRST * 2 ** (tries - 1))
        self._refused[slot.rank] = Refused(slot, begin, facts, time.monotonic() + delay)
        return delay

    def hold(self, slot: Slot, begin: Begin, facts: dict[str, Any]) -> bool:
        """Until :meth:`release`, or for a while. True the second time in a row, as most need only one."""
        self._held[slot.rank] = self._held.get(slot.rank, 0) + 1
        self._refused[slot.rank] = Refused(slot, begin, facts, time.monotonic() + HELD)
        return self._held[slot.rank] == 2

    def release(self) -> None:
        """Those that are held are due."""
        for rank in self._held.keys() & self._refused.keys():
            self._refused[rank].at = time.monotonic()

    def succeeded(self, slot: Slot) -> None:
        self._held.pop(slot.rank, None)
        self._tries.pop(slot.rank, None)

    def take_due(self) -> list[Refused]:
        now = time.monotonic()
        due = [one for one in self._refused.values() if one.at <= now]
        for one in due:
            del self._refused[one.slot.rank]
        return due

    def clear(self) -> None:
        self._refused.clear()

    def next_at(self) -> float | None:
        return min((one.at for one in self._refused.values()), default=None)
