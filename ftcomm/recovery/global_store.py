"""Logs in a global store: the survivors of a lost machine upload theirs, and its replacement fetches them while they come.

>>> with LogUploader("s3://bucket/logs", job, "0-to-1") as log:  # on a survivor
...     for record in records:
...         log.append(record)
>>> for record in fetch("s3://bucket/logs", job, "0-to-1", follow=True, timeout=300):  # on the replacement
...     replay(record)

An object store has no events, so a reader that follows looks again after a short, growing pause.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

from ftcomm.errors import ConfigError, LogCorrupt, Timeout
from ftcomm.recovery._numbers import count, number
from ftcomm.recovery.chunks import Chunk, Header, LogRecord
from ftcomm.recovery.places import PATIENCE, SUFFIX, TEMPORARY, open_place
from ftcomm.recovery.stored_log import END_MARKER, StoredLog, folder_of
from ftcomm.recovery.uploader import LogUploader

__all__ = ["LogRecord", "LogUploader", "collect", "fetch", "remove"]

_Options = Mapping[str, Any] | None


def fetch(
    url: str,
    job: str,
    name: str,
    *,
    from_seq: int = 1,
    follow: bool = False,
    timeout: float | None = None,
    prefetch: int = 1,
    storage_options: _Options = None,
) -> Generator[LogRecord, None, None]:
    """The records of a log from ``from_seq`` on, in order; the next ``prefetch`` chunks are read while the caller works.

    ``follow`` waits for what is still being uploaded, ``timeout`` seconds for each chunk (None: for ever). Without it a log
    that has no end marker yields what is there, and then raises LogCorrupt.

    A payload is a view into its chunk, which stays in memory as long as any of its payloads does: copy what you keep.
    """
    from_seq = count("from_seq", from_seq, "records")
    prefetch = count("prefetch", prefetch, "chunks")
    if timeout is not None:
        timeout = number("timeout", timeout, "seconds", zero=True, infinite=True)
    log = StoredLog(open_place(url, storage_options), job, name)
    return _fetch(log, from_seq, follow, timeout, prefetch)


def _fetch(
    log: StoredLog, from_seq: int, follow: bool, timeout: float | None, prefetch: int
) -> Generator[LogRecord, None, None]:
    reader = _Reader(log, from_seq, follow, timeout, prefetch)
    try:
        while True:
            found = reader.next()
            if found is None:
                return
            for record in found.records():
                if record.seq >= from_seq:
                    yield record
            del found
    finally:
        reader.close()


def remove(url: str, job: str, *, storage_options: _Options = None) -> int:
    """Removes all logs of a job: how many objects. Anything that is not ours stays."""
    place = open_place(url, storage_options)
    folder = folder_of("job", job)
    removed = 0
    for name in place.names(folder):
        inside = f"{folder}/{name}"
        ours = [entry for entry in place.names(inside) if entry.endswith((SUFFIX, TEMPORARY))]
        for entry in sorted(ours, key=lambda entry: (entry == END_MARKER, entry)):
            place.delete(f"{inside}/{entry}")
            removed += 1
        place.remove_folder(inside)
    place.remove_folder(folder)
    return removed


def collect(url: str, job: str, name: str, through_seq: int, *, storage_options: _Options = None) -> int:
    """Removes the chunks of a log that have no record after ``through_seq``: how many.

    Of a log that has no end marker the last chunk stays in any case: an upload that is resumed goes on after it.
    """
    through_seq = count("through_seq", through_seq, "records", least=0)
    log = StoredLog(open_place(url, storage_options), job, name)
    ordinals, ended = log.present()
    needed = len(ordinals)
    if ordinals:
        needed = log.locate(ordinals, through_seq + 1)
        if needed == len(ordinals) - 1 and ended and log.header(ordinals[-1]).last_seq <= through_seq:
            needed += 1
    for ordinal in ordinals[:needed]:  # in this order: what is left after a crash is whole
        log.place.delete(log.path(ordinal))
    return needed


_PIECE = 1.0  # seconds


class _Reader:
    """Reads chunks ahead on a thread, at most ``prefetch``, and waits for those that are still to come."""

    def __init__(self, log: StoredLog, from_seq: int, follow: bool, timeout: float | None, prefetch: int) -> None:
        self._log, self._from_seq, self._follow, self._timeout = log, from_seq, follow, timeout
        self._stop = threading.Event()
        self._room = threading.Semaphore(prefetch)
        self._ready: queue.SimpleQueue[Chunk | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"ftcomm-fetch-{log.name}", daemon=True)
        self._thread.start()

    def next(self) -> Chunk | None:
        """The next chunk; None at the end."""
        while True:
            # A signal that comes between Python's last look and the wait ends no wait: cut into pieces, Ctrl-C is never lost.
            with contextlib.suppress(queue.Empty):
                found = self._ready.get(timeout=_PIECE)
                break
        self._room.release()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        self._stop.set()
        self._room.release()
        self._thread.join(PATIENCE)  # for one request at most

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._ready.put(error)

    def _read(self) -> None:
        ordinal = self._find_start()
        last: Header | None = None
        while ordinal is not None:
            self._room.acquire()
            if self._stop.is_set():
                return
            chunk = self._wait_for(ordinal, last)
            if chunk is None:
                break
            self._check_order(chunk.header, last)
            last = chunk.header
            ordinal += 1
            self._ready.put(chunk)
        self._ready.put(None)

    def _find_start(self) -> int | None:
        """The ordinal of the chunk with the first record; None: there will be none."""
        log, seq = self._log, self._from_seq
        waiting = _Waiting(self)
        sure = False  # a listing made while files appear may lack some: what would be an error is looked at twice
        while True:
            ordinals, ended = log.present()
            try:
                start = ordinals[log.locate(ordinals, seq)] if ordinals else -1
                first = log.header(start).first_seq if ordinals else 0
            except FileNotFoundError as error:
                raise LogCorrupt(f"A chunk of the {log} vanished while it was read: {error}.") from None
            end = log.end() if ended and not ordinals else None
            if ordinals and first <= seq:
                return start
            if end is not None and (end.ordinal == 0 or seq > end.last_seq):
                return None
            if (ordinals or end is not None) and not sure:
                sure = True
            elif ordinals:
                raise LogCorrupt(
                    f"The {log} begins with record {first} in chunk {start}: records {seq} to {first - 1} were collected, "
                    f"never uploaded, or lost. If a checkpoint covers them, use from_seq={first}."
                )
            elif end is not None:
                raise LogCorrupt(
                    f"No chunk of the {log} is left of {end.ordinal}: records {seq} to {end.last_seq} were collected or "
                    "lost. Recover from a later checkpoint."
                )
            elif not self._follow:
                there = ", ".join(sorted(log.place.names(folder_of("job", log.job)))) or "none"
                raise ConfigError(
                    f"There is no {log} (logs of the job there: {there}). If its upload is still to begin, use follow=True."
                )
            elif not waiting.pause():
                if self._stop.is_set():
                    return None
                raise Timeout(
                    f"The {log} did not appear within {self._timeout:g} s: nothing of it is there, chunk 0 is missing. See "
                    "whether its uploader lives and writes to the same URL."
                )

    def _wait_for(self, ordinal: int, last: Header | None) -> Chunk | None:
        """The chunk; None if the log ends before it, or if the caller has closed."""
        log = self._log
        waiting = _Waiting(self)
        while True:
            with contextlib.suppress(FileNotFoundError):
                return log.chunk(ordinal)
            ordinals, ended = log.present()
            later = bool(ordinals) and ordinals[-1] >= ordinal
            if ended or later:
                with contextlib.suppress(FileNotFoundError):  # it may have come in between, but not after a later one
                    return log.chunk(ordinal)
                end = log.end() if ended else None
                if end is not None and self._is_end(end, ordinal, last) and not later:
                    return None
                raise LogCorrupt(
                    f"{log.where(ordinal)} is missing, with the records after {_last_seq(last)}, but "
                    f"{f'chunk {ordinals[-1]}' if later else 'the end marker'} is there"
                    f"{f', which says {end.ordinal} chunks and {end.count} records up to {end.last_seq}' if end else ''}. "
                    "Recover from a checkpoint, or upload the job's logs again (remove them first)."
                )
            what = f"chunk {ordinal}, the records after {_last_seq(last)} and the end marker"
            if not self._follow:
                raise LogCorrupt(
                    f"The {log} is not complete: {what} are missing. If its upload goes on, use follow=True; else its "
                    "uploader has died and has to be started again."
                )
            if not waiting.pause():
                if self._stop.is_set():
                    return None
                raise Timeout(
                    f"Nothing new came from the {log} for {self._timeout:g} s: {what} are missing. See whether its "
                    "uploader lives."
                )

    @staticmethod
    def _is_end(end: Header, ordinal: int, last: Header | None) -> bool:
        """The end marker says the same as the chunks."""
        if last is None:
            return ordinal == end.ordinal
        return (ordinal, last.last_seq, last.before + last.count) == (end.ordinal, end.last_seq, end.count)

    def _check_order(self, header: Header, last: Header | None) -> None:
        if last is not None and (header.first_seq, header.before) != (last.last_seq + 1, last.before + last.count):
            raise LogCorrupt(
                f"{self._log.where(header.ordinal)} begins with record {header.first_seq}, but the chunk before it ends with "
                f"{last.last_seq}: two uploaders wrote the same log. Give each its own name."
            )


def _last_seq(header: Header | None) -> int:
    return 0 if header is None else header.last_seq


class _Waiting:
    """Growing pauses that end with the reader's time-out, or when it is closed."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._pause, self._longest = reader._log.place.pauses
        self._deadline = None if reader._timeout is None else time.monotonic() + reader._timeout

    def pause(self) -> bool:
        """False: no more."""
        pause = self._pause
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                return False
            pause = min(pause, left)
        self._pause = min(2 * self._pause, self._longest)
        return not self._reader._stop.wait(pause)
