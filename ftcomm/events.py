"""Files of events: a line of JSON each."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

__all__ = ["EventFile", "LineFile", "event_file_name", "event_folders"]


def event_file_name(rank: int, incarnation: int) -> str:
    """``events-2-1.jsonl``: the second process of slot 2."""
    return f"events-{rank}-{incarnation}.jsonl"


class LineFile:
    """Appends lines to a file, each with one ``write`` to a descriptor opened with O_APPEND.

    So a reader sees whole lines only, and a process that is killed leaves at most nothing of its last one. What cannot be
    written (the disk is full) is left out, which is said once on stderr: the run is worth more than what is told of it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.lost = False  # something could not be written
        self._torn = False  # the last line was written in part: the next one must not become its end
        self._told = False

    def write(self, line: str) -> None:
        if self.fd < 0:
            return
        data = b"\n" * self._torn + line.encode() + b"\n"
        try:
            self._torn = os.write(self.fd, data) < len(data)
            self.lost = self.lost or self._torn
        except OSError as error:
            self.lost = True
            if not self._told:
                self._told = True
                _tell_lost(self.path, error)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _tell_lost(path: str, error: OSError) -> None:
    with contextlib.suppress(OSError):  # it may be on the same disk
        print(f"ftcomm: {path}: {error.strerror}; the run goes on, but events are lost", file=sys.stderr)


def event_folders(wanted: str | None) -> list[str]:
    """The folder that the options name, and under ftrun its own: by its workers' events it knows who is a member."""
    folders = [wanted] if wanted else []
    launchers = os.environ.get("FTCOMM_EVENTS") if "FTCOMM_INCARNATION" in os.environ else None
    if launchers and not any(os.path.realpath(folder) == os.path.realpath(launchers) for folder in folders):
        folders.append(launchers)
    return folders


def _numbers_under_ftrun() -> list[int] | None:
    numbers = [os.environ.get(name, "") for name in ("RANK", "FTCOMM_INCARNATION")]
    return [*map(int, numbers)] if all(map(str.isdigit, numbers)) else None


class EventFile:
    """Appends events to ``events-RANK-INCARNATION.jsonl`` in each folder. Where that can't be made it is said, and the run goes
    on.
    """

    def __init__(self, folders: Iterable[str], rank: int, incarnation: int) -> None:
        self._files: list[LineFile] = []
        for folder in folders:
            path = os.path.join(folder, event_file_name(rank, incarnation))
            try:
                os.makedirs(folder, exist_ok=True)
                self._files.append(LineFile(path))
            except OSError as error:
                _tell_lost(path, error)
        self._stamp: dict[str, Any] = {"rank": rank, "incarnation": incarnation}
        # In a job that the script has made this process may have other numbers than ftrun knows it by.
        launched = _numbers_under_ftrun()
        if launched not in (None, [rank, incarnation]):
            self._stamp["worker"] = launched

    def write(self, event: dict[str, Any]) -> None:
        """Adds ``time`` (seconds since 1970), ``rank`` and ``incarnation`` in the job, unless the event has them."""
        whole = {"time": time.time(), **self._stamp, **event}
        line = json.dumps(whole, separators=(",", ":"), default=str)
        for file in self._files:
            file.write(line)

    def close(self) -> None:
        for file in self._files:
            file.close()
