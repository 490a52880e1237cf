"""The run folder: each worker writes ``events-<rank>-<incarnation>.jsonl``; ftrun follows these files and merges them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ftcomm.launch import preempt

Event = dict[str, Any]

_IN_MODIFY = 0x2
_IN_CREATE = 0x100
_WORKER_FILE = re.compile(r"^events-(\d+)-(\d+)\.jsonl$")
_TEMPORARY = re.compile(r"^ftrun-(\d+)-\w+$")
_MAX_LINE = 1 << 20


def parse_line(line: bytes) -> Event | None:
    """One event, or None for what is not one: a killed worker may leave half a line."""
    if len(line) > _MAX_LINE:
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if isinstance(event.get("time"), bool) or not isinstance(event.get("time"), (int, float)):
        return None
    event["event"] = event["event"].replace("_", "-").replace(" ", "-")
    return event


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The events of one file, in its order; lines that are no events are left out."""
    with open(path, "rb") as file:
        return [event for line in file if (event := parse_line(line)) is not None]


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Writes a file of events, sorted by time; a reader never sees half of it."""
    scratch = path.with_suffix(".part")
    with open(scratch, "w", encoding="utf-8") as file:
        for event in sorted(events, key=lambda e: e["time"]):
            file.write(json.dumps(event) + "\n")
    os.replace(scratch, path)


class RunFolder:
    """A run's folder as ftrun sees it: a file descriptor that becomes readable when a worker has written.

    ``path=None`` makes a temporary folder, removed by :meth:`close`.
    """

    def __init__(self, path: str | None) -> None:
        self._temporary = path is None
        if path is None:
            remove_abandoned()
            path = tempfile.mkdtemp(prefix=f"ftrun-{os.getpid()}-")
        self.path = Path(path).resolve()
        self.path.mkdir(parents=True, exist_ok=True)
        self._read: dict[str, int] = {}  # file name -> how far it has been read
        self._ranks: set[int] = set()
        self._node = 0
        self._own_name = "ftrun.jsonl"
        self._own: Any = None
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify is not available: see fs.inotify.max_user_instances")
        if libc.inotify_add_watch(self.fd, os.fsencode(self.path), _IN_MODIFY | _IN_CREATE) < 0:
            raise OSError(
                ctypes.get_errno(), f"the run folder {self.path} can't be watched; give another with --events"
            )

    def begin(self, ranks: Iterable[int], node: int, nodes: int) -> None:
        """Before the workers start: what an earlier run left of these ranks goes."""
        self._ranks, self._node = set(ranks), node
        preempt.remove_notices(self.path)
        self.merged_name = "events.jsonl" if node == 0 else f"events-node{node}.jsonl"
        self._own_name = f"ftrun-{node}.jsonl"
        for entry in list(self.path.iterdir()):
            worker = _WORKER_FILE.match(entry.name)
            mine = entry.name in (self._own_name, self.merged_name) or (worker and int(worker[1]) in self._ranks)
            if mine or (worker and nodes == 1):
                entry.unlink(missing_ok=True)
        self._own = open(self.path / self._own_name, "w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def preempted(self) -> None:
        """Workers that get SIGTERM from now on find out that it is for all of this node's."""
        with contextlib.suppress(OSError):  # a full disk: they leave one by one
            preempt.leave_notice(self.path, self._node, self._ranks)

    def log(self, name: str, **fields: Any) -> Event:
        """ftrun's own event."""
        event: Event = {"time": time.time(), "event": name, "source": "ftrun", **fields}
        if self._own is not None:
            self._own.write(json.dumps(event) + "\n")
        return event

    def new_events(self) -> list[Event]:
        """What workers have written since the last call, oldest first. Never blocks."""
        try:
            while os.read(self.fd, 65536):
                pass
        except BlockingIOError:
            pass
        events: list[Event] = []
        for name in self._names():
            worker = _WORKER_FILE.match(name)
            if worker is not None and int(worker[1]) in self._ranks:
                events += self._tail(name)
        return sorted(events, key=lambda e: e["time"])

    def _names(self) -> list[str]:
        """Of what is in it. Who has removed the folder takes the events away, not the run."""
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def _tail(self, name: str) -> list[Event]:
        start = self._read.get(name, 0)
        try:
            with open(self.path / name, "rb") as file:
                file.seek(start)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1  # the rest of a line is still being written
        self._read[name] = start + whole
        return [event for line in data[:whole].splitlines() if (event := parse_line(line)) is not None]

    def merge(self) -> Path | None:
        """Writes ``events.jsonl``, all events of this node in the order of time; None for a temporary folder."""
        if self._temporary or self._own is None or not self.path.is_dir():
            return None
        files = [self.path / self._own_name]
        for entry in self.path.iterdir():
            worker = _WORKER_FILE.match(entry.name)
            if worker is not None and int(worker[1]) in self._ranks:
                files.append(entry)
        merged = self.path / self.merged_name
        write_events(merged, (event for file in files for event in read_events(file)))
        return merged

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
        os.close(self.fd)
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        logs = self.path / "logs"
        if not any(
            path.is_file() for path in logs.rglob("*")
        ):  # torch makes its folders even where nothing is redirected
            shutil.rmtree(logs, ignore_errors=True)


def remove_abandoned(report: Callable[[str], None] | None = None) -> None:
    """Removes temporary run folders whose ftrun is gone (it was killed with SIGKILL)."""
    for entry in Path(tempfile.gettempdir()).iterdir():
        match = _TEMPORARY.match(entry.name)
        if match is None or entry.is_symlink() or _exists(int(match[1])):
            continue
        try:
            if entry.stat().st_uid == os.getuid():
                shutil.rmtree(entry)
                if report is not None:
                    report(str(entry))
        except OSError:
            continue


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
