"""The run folder: each worker writes ``events-<rank>-<incarnation>.jsonl``; ftrun follows these files and merges them."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ftcomm.errors import ConfigError
from ftcomm.events import LineFile
from ftcomm.launch import preempt
from ftcomm.launch.locks import try_lock

Event = dict[str, Any]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_IN_MODIFY = 0x2
_IN_CREATE = 0x100
_IN_EXCL_UNLINK = 0x04000000
# Not what is written where no name leads to, which is ftrun's own probe (loses_events): it woke itself with each look.
_WATCHED = _IN_MODIFY | _IN_CREATE | _IN_EXCL_UNLINK
_WORKER_FILE = re.compile(r"^events-(\d+)-(\d+)\.jsonl$")
_TEMPORARY = re.compile(r"^ftrun-(\d+)-\w+$")
_MAX_LINE = 1 << 20
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
_FREED = 1 << 20  # bytes that have been read, from which on they are given back
_PROBE = 1 << 16  # bytes
_WINDOW = 4096  # events of one file, over which they are put in order

# What comes of an event of which a field is missing or is something else: such a one is left out, and the run goes on.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def parse_line(line: bytes) -> Event | None:
    """One event, or None for what is not one: a killed worker may leave half a line."""
    if len(line) > _MAX_LINE:
        return None
    try:
        event = json.loads(line)
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            return None
        if not _is_number(event.get("time"), float) or not math.isfinite(event["time"]):
            return None
    except (ValueError, OverflowError, RecursionError):
        return None
    if not all(_is_number(event[name]) for name in ("rank", "incarnation") if name in event):
        return None
    event["event"] = event["event"].replace("_", "-").replace(" ", "-")
    return event


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, (int, *kinds)) and not isinstance(value, bool)


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The events of one file, in its order; lines that are no events are left out."""
    return list(_each_event(path))


def _each_event(path: str | os.PathLike[str]) -> Iterator[Event]:
    with open(path, "rb") as file:
        for line in file:
            if (event := parse_line(line)) is not None:
                yield event


def _in_order(path: Path) -> Iterator[tuple[float, int, Event]]:
    """One file's events by time. They are nearly so already: what other threads saw is written a little later."""
    held: list[tuple[float, int, Event]] = []
    for number, event in enumerate(_each_event(path)):
        entry = (event["time"], number, event)
        if len(held) < _WINDOW:
            heapq.heappush(held, entry)
        else:
            yield heapq.heappushpop(held, entry)
    yield from sorted(held)


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Writes a file of events; a reader never sees half of it."""
    scratch = path.with_suffix(".part")
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            for event in events:
                file.write(json.dumps(event) + "\n")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def make_folder(path: Path, what: str, option: str) -> None:
    """Which may be there. OSError: it can't be; says by which option another one is given."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "there is a file of that name" if isinstance(error, FileExistsError) else error.strerror
        raise OSError(error.errno, f"the {what} {path} can't be made: {why}; give another with {option}") from error


class RunFolder:
    """A run's folder as ftrun sees it: a file descriptor that becomes readable when a worker has written.

    ``path=None`` makes a temporary folder, removed by :meth:`close`.
    """

    def __init__(self, path: str | None) -> None:
        self._held: int | None = None  # a temporary folder, locked
        if path is None:
            remove_abandoned()
            path = tempfile.mkdtemp(prefix=f"ftrun-{os.getpid()}-")
            self._held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try_lock(self._held)
        self.path = Path(path).resolve()
        make_folder(self.path, "run folder", "--events")
        self._read: dict[str, int] = {}  # file name -> how far it has been read
        self._ranks: set[int] = set()
        self._node = 0
        self._own: LineFile | None = None
        self._full = False
        try:
            self.fd = self._watched()
        except OSError:
            self._let_go()
            raise

    def _watched(self) -> int:
        fd = int(_LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if fd < 0:
            raise OSError(
                ctypes.get_errno(), "inotify is not available: see fs.inotify.max_user_instances, and ulimit -n"
            )
        if _LIBC.inotify_add_watch(fd, os.fsencode(self.path), _WATCHED) < 0:
            error = ctypes.get_errno()
            os.close(fd)
            raise OSError(error, f"the run folder {self.path} can't be watched; give another with --events")
        return fd

    def _let_go(self) -> None:
        """Of the temporary folder."""
        if self._held is not None:
            os.close(self._held)  # first: there may be no other descriptor to look into it
            shutil.rmtree(self.path, ignore_errors=True)

    def begin(self, ranks: Iterable[int], node: int, nodes: int) -> None:
        """Before the workers start: what an earlier run left of these ranks goes. ConfigError: another ftrun is at work here."""
        self._ranks, self._node = set(ranks), node
        own = LineFile(str(self.path / f"ftrun-{node}.jsonl"))
        if not try_lock(own.fd):  # until it is closed, or its process is dead
            own.close()
            raise ConfigError(f"another ftrun writes into the run folder {self.path}; give a different --events")
        os.ftruncate(own.fd, 0)
        self._own = own
        preempt.remove_notices(self.path)
        self.merged_name = "events.jsonl" if node == 0 else f"events-node{node}.jsonl"
        for entry in list(self.path.iterdir()):
            worker = _WORKER_FILE.match(entry.name)
            mine = entry.name == self.merged_name or (worker and int(worker[1]) in self._ranks)
            if mine or (worker and nodes == 1):
                entry.unlink(missing_ok=True)

    def preempted(self) -> None:
        """Workers that get SIGTERM from now on find out that it is for all of this node's."""
        with contextlib.suppress(OSError):  # a full disk: they leave one by one
            preempt.leave_notice(self.path, self._node, self._ranks)

    def log(self, name: str, **fields: Any) -> Event:
        """ftrun's own event."""
        event: Event = {"time": time.time(), "event": name, "source": "ftrun", **fields}
        if self._own is not None:
            self._own.write(json.dumps(event))
        return event

    def loses_events(self) -> bool:
        """Whether something that workers have told may be lost: the disk is full, or was so when ftrun wrote."""
        if not self._full:
            try:
                with tempfile.TemporaryFile(dir=self.path) as probe:
                    probe.write(bytes(_PROBE))
            except OSError:
                self._full = True
        return self._full or (self._own is not None and self._own.lost)

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
        """Of what is in it. Who has removed the folder, or left no descriptor for it, takes the events away, not the run."""
        try:
            return sorted(os.listdir(self.path))
        except OSError:
            return []

    def _tail(self, name: str) -> list[Event]:
        start = self._read.get(name, 0)
        try:
            with open(self.path / name, "rb") as file:
                file.seek(start)
                data = file.read()
        except OSError:  # the next time goes on from here
            return []
        whole = data.rfind(b"\n") + 1  # the rest of a line is still being written
        if self._held is not None and start // _FREED < (start + whole) // _FREED:  # nobody reads them again
            give_back(self.path / name, start + whole)
        self._read[name] = start + whole
        return [event for line in data[:whole].splitlines() if (event := parse_line(line)) is not None]

    def merge(self, hear: Callable[[Event], None]) -> Path | None:
        """Writes ``events.jsonl``, all events of this node in the order of time; None for a temporary folder.

        ``hear`` is given each of them.
        """
        if self._held is not None or self._own is None or not self.path.is_dir():
            return None
        files = [Path(self._own.path)]
        for entry in self.path.iterdir():
            worker = _WORKER_FILE.match(entry.name)
            if worker is not None and int(worker[1]) in self._ranks:
                files.append(entry)
        merged = self.path / self.merged_name
        each = heapq.merge(*map(_in_order, files), key=lambda entry: entry[0])  # not all of them at once in memory

        def heard() -> Iterator[Event]:
            for _, _, event in each:
                hear(event)
                yield event

        write_events(merged, heard())
        return merged

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
        os.close(self.fd)
        if self._held is not None:
            self._let_go()
            return
        logs = self.path / "logs"
        if not any(
            path.is_file() for path in logs.rglob("*")
        ):  # torch makes its folders even where nothing is redirected
            shutil.rmtree(logs, ignore_errors=True)


def give_back(path: Path, size: int) -> None:
    """The room of a file's first ``size`` bytes, which read as zeros then. On a file system that can't they stay."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:  # another user's, for one
        _LIBC.fallocate(file.fileno(), _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, 0, size)


def remove_abandoned(report: Callable[[str], None] | None = None) -> None:
    """Removes temporary run folders whose ftrun is gone (it was killed with SIGKILL)."""
    try:
        entries = list(Path(tempfile.gettempdir()).iterdir())
    except OSError:  # a folder where files may be made, but not listed
        return
    for entry in entries:
        match = _TEMPORARY.match(entry.name)
        if match is None or entry.is_symlink():
            continue
        # OverflowError: anybody may make a folder there whose name has no number of a process.
        with contextlib.suppress(OSError, OverflowError):
            if entry.stat().st_uid != os.getuid() or _exists(int(match[1])) or _is_held(entry):
                continue
            shutil.rmtree(entry)
            if report is not None:
                report(str(entry))


def _is_held(folder: Path) -> bool:
    """Where containers share a folder for temporary files, its process may be there, and not be seen from here."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
