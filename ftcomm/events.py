"""The file of one rank's events: a line of JSON each."""

from __future__ import annotations

import json
import os
import time
from typing import Any

__all__ = ["EventFile", "event_file_name"]


def event_file_name(rank: int, incarnation: int) -> str:
    """``events-2-1.jsonl``: the second process of slot 2."""
    return f"events-{rank}-{incarnation}.jsonl"


class EventFile:
    """Appends events to ``folder/events-RANK-INCARNATION.jsonl``.

    Each event is one ``write`` to a descriptor opened with O_APPEND, so that a reader sees whole lines only, and a process
    that is killed leaves at most nothing of its last event.
    """

    def __init__(self, folder: str, rank: int, incarnation: int) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, event_file_name(rank, incarnation))
        self._stamp = {"rank": rank, "incarnation": incarnation}
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, event: dict[str, Any]) -> None:
        """Adds ``time`` (seconds since 1970), ``rank`` and ``incarnation`` of the writer unless the event has them."""
        if self._fd >= 0:
            line = json.dumps({"time": time.time(), **self._stamp, **event}, separators=(",", ":"), default=str)
            os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
