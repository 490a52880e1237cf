"""Who has left the job and who is dead to the others, as workers tell it: under the policy replay no exit code says so."""

from __future__ import annotations

from typing import Any

from ftcomm.launch.folder import Event
from ftcomm.launch.workers import Slot

NO_DEATH = ("left", "group")  # the second: it ends for another one's sake


class Goodbyes:
    """Hears the workers' events."""

    def __init__(self) -> None:
        self._left: set[tuple[Any, Any]] = set()  # (rank, incarnation), all of them
        self._missed: set[tuple[Any, Any]] = set()

    def hear(self, event: Event) -> None:
        if event["event"] == "goodbye":
            self._left.add((event.get("rank"), event.get("incarnation")))
        elif (
            event["event"] == "removed"
            and event.get("evidence") not in NO_DEATH
            and event.get("slot") != event.get("rank")
        ):
            self._missed.add((event.get("slot"), event.get("slot_incarnation")))

    def left(self, slot: Slot) -> bool:
        """Whether its worker has left in good order: whatever it still does, it does for itself."""
        return (slot.rank, slot.incarnation) in self._left

    def missed(self, slot: Slot) -> bool:
        """Whether the others have found that its worker, a member, was gone, and it has not said goodbye."""
        return (slot.rank, slot.incarnation) in self._missed and not self.left(slot)

    def settle(self, slot: Slot) -> None:
        """It is seen to."""
        self._missed.discard((slot.rank, slot.incarnation))
