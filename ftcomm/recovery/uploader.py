"""Uploading a log to the global store from a background thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ftcomm.errors import Closed, ConfigError, Error, InternalError, LogCorrupt, SystemFailure
from ftcomm.recovery._numbers import count
from ftcomm.recovery.chunks import CHUNK, END, Header, LogRecord, encode, pack_record, record_size
from ftcomm.recovery.places import PATIENCE, TEMPORARY, open_place
from ftcomm.recovery.stored_log import StoredLog

__all__ = ["LogUploader"]

_Packed = tuple[bytes, bytes]


@dataclass
class _Batch:
    """Records on their way to the thread: a chunk to upload, or records to compare with what is there."""

    first_seq: int
    records: list[_Packed]
    compare: bool


class LogUploader:
    """Uploads the log ``name`` of ``job``: append its records in order, then ``close()``, which marks its end.

    After a crash another uploader with the same arguments goes on: ``next_seq`` says from where. Records before it may be
    appended again; they are compared with what is there and not written again.

    ``url`` is a directory, a ``file://`` URL, or any URL that fsspec can open with ``storage_options``. A chunk is uploaded
    when it has ``chunk_bytes`` (a larger record makes a larger chunk), or with ``flush()``. At most ``queue_chunks`` wait for
    the upload; then ``append`` waits. What goes wrong in the background is raised by the next call.

    As a context manager it closes on success only: after an exception the log has no end marker.
    """

    def __init__(
        self,
        url: str,
        job: str,
        name: str,
        *,
        chunk_bytes: int = 8 << 20,
        queue_chunks: int = 2,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        chunk_bytes = count("chunk_bytes", chunk_bytes, "bytes")
        queue_chunks = count("queue_chunks", queue_chunks, "chunks")
        self._log = StoredLog(open_place(url, storage_options), job, name)
        self._chunk_bytes = chunk_bytes
        self._last: Header | None = None  # of the last chunk in the store; the thread's, once it runs
        self._start = 0  # ordinal of the first chunk
        self._there: list[int] = []  # the chunks that were there at the start
        self._known: list[LogRecord] = []  # the records of one of them, while records are compared
        self._resume()
        self.next_seq: int | None = None if self._last is None else self._last.last_seq + 1
        """The number after the last record that is in the store or was appended; None: nothing is there, any may come."""
        self._resumed = self.next_seq
        self._appended: int | None = None
        self._open: list[_Packed] = []
        self._open_first = 0
        self._open_bytes = 0
        self._error: Error | None = None
        self._closed = False
        self._queue: queue.Queue[_Batch | None] = queue.Queue(queue_chunks)
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ftcomm-upload-{name}", daemon=True)
        self._thread.start()

    # What is there

    def _resume(self) -> None:
        """Finds the last whole chunk; what is damaged after it is removed, so that it can be written again."""
        log = self._log
        for name in log.place.names(log.folder):
            if name.endswith(TEMPORARY):  # of an uploader that was killed
                log.place.remove_abandoned(f"{log.folder}/{name}")
        self._there, ended = log.present()
        for before, after in zip(self._there, self._there[1:], strict=False):
            if after != before + 1:
                raise LogCorrupt(
                    f"{log.where(before + 1)} is missing, but later ones are there. Remove the job's logs "
                    "(ftcomm.recovery.global_store.remove) and upload them again."
                )
        while self._there:
            ordinal = self._there[-1]
            try:
                self._last = log.chunk(ordinal).header
                break
            except LogCorrupt as damage:
                if ordinal > 0 and len(self._there) == 1:
                    raise LogCorrupt(
                        f"{damage} It is the only one left of its log, so the upload can't go on after it: remove "
                        "the job's logs (ftcomm.recovery.global_store.remove) and upload them again."
                    ) from None
            if ended:
                log.place.delete(log.end_path)  # new chunks may be cut elsewhere
                ended = False
            log.place.delete(log.path(ordinal))
            self._there.pop()
        self._ended = log.end() if ended else None
        if self._ended is not None and self._last is None and self._ended.ordinal > 0:
            raise ConfigError(f"The {log} is complete and was collected; use another name.")
        if self._ended is not None and self._last is not None and self._ended.ordinal != self._last.ordinal + 1:
            raise LogCorrupt(
                f"The {log} has an end marker for {self._ended.ordinal} chunks, but its last one is {self._last.ordinal}. "
                "Remove the job's logs (ftcomm.recovery.global_store.remove) and upload them again."
            )

    # The caller's side

    def append(self, record: LogRecord) -> None:
        """Takes the next record; its payload is copied. Waits while the queue is full."""
        self._check()
        packed = pack_record(record)
        expected = self.next_seq if self._appended is None else self._appended + 1
        resumed = self._resumed
        if record.seq < 1 or (expected is not None and record.seq > expected) or (
            self._appended is not None and record.seq != expected
        ):  # fmt: skip
            raise ConfigError(
                f"Record {record.seq} can't be appended to the {self._log}: the next one is {expected or 'at least 1'}."
            )
        compare = resumed is not None and record.seq < resumed
        if self._ended is not None and not compare:
            raise ConfigError(
                f"Record {record.seq} can't be appended to the {self._log}: it is complete, with {self._ended.count} "
                "records. Use another name."
            )
        size = record_size(len(packed[1]))
        if self._open and (self._open_bytes + size > self._chunk_bytes or record.seq == resumed):
            self._send()
        if not self._open:
            self._open_first = record.seq
        self._open.append(packed)
        self._open_bytes += size
        self._appended = record.seq
        self.next_seq = max(record.seq + 1, resumed or 0)
        if self._open_bytes >= self._chunk_bytes:
            self._send()

    def flush(self) -> None:
        """Returns when every record that was appended is in the store. The open chunk is closed for it."""
        self._check()
        self._send()
        self._queue.join()
        self._check()

    def close(self) -> None:
        """Uploads the rest and the end marker, and ends the thread. Without it a reader takes the log for unfinished."""
        if self._closed:
            return
        try:
            self.flush()
            self._finish()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends the thread without an end marker; what was appended since the last flush may be lost."""
        self._closed = True
        self._open.clear()
        self._abandoned.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(PATIENCE)

    def __enter__(self) -> LogUploader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message) from self._error.__cause__
        if self._closed:
            raise Closed(f"The uploader of the {self._log} was closed.")

    def _send(self) -> None:
        if self._open:
            compare = self._resumed is not None and self._open_first < self._resumed
            batch = _Batch(self._open_first, self._open, compare)
            self._queue.put(batch)  # Ctrl-C may end it: then the records are still open
            self._open, self._open_bytes = [], 0

    def _finish(self) -> None:
        """The thread is idle: everything is there but the end marker."""
        log, last = self._log, self._last
        end = Header(
            END, log.job, log.name,
            ordinal=0 if last is None else last.ordinal + 1, before=0, count=0 if last is None else last.before + last.count,
            first_seq=0, last_seq=0 if last is None else last.last_seq,
        )  # fmt: skip
        self._put(log.end_path, end.pack(), "The end marker")

    # The thread's side

    def _run(self) -> None:
        while True:
            batch = self._queue.get()
            try:
                if self._abandoned.is_set():
                    return
                if batch is not None and self._error is None:  # after an error it only empties the queue
                    self._compare(batch) if batch.compare else self._upload(batch)
            except Error as error:
                self._error = error
            except Exception as error:  # noqa: BLE001 - the caller has to hear of it
                self._error = SystemFailure(f"Uploading the {self._log} failed: {type(error).__name__}: {error}.")
                self._error.__cause__ = error
            finally:
                self._queue.task_done()

    def _upload(self, batch: _Batch) -> None:
        self._known = []
        last = self._last
        if last is not None and batch.first_seq != last.last_seq + 1:
            raise InternalError(
                f"Record {batch.first_seq} came after {last.last_seq} in the upload of the {self._log}."
            )
        header = Header(
            CHUNK,
            self._log.job,
            self._log.name,
            ordinal=0 if last is None else last.ordinal + 1,
            before=0 if last is None else last.before + last.count,
            count=len(batch.records),
            first_seq=batch.first_seq,
            last_seq=batch.first_seq + len(batch.records) - 1,
        )
        self._put(self._log.path(header.ordinal), encode(header, batch.records), f"Chunk {header.ordinal}")
        self._last = header

    def _put(self, path: str, data: bytes, what: str) -> None:
        place = self._log.place
        try:
            place.put(path, data)
        except FileExistsError:
            if place.get(path) == data:  # our own, whose answer was lost; or the same of an earlier run
                return
            raise ConfigError(
                f"{what} of the {self._log} is there already, and differs: another uploader writes the same log. Let "
                "one process upload it, or give each its own name."
            ) from None
        except (SystemFailure, FileNotFoundError) as error:
            done = self._last.last_seq if self._last is not None else None
            sure = f"Records up to {done} are there" if done is not None else "No record is there yet"
            raise SystemFailure(
                f"{what} of the {self._log} can't be uploaded. {error} {sure}. When the cause is removed (space, "
                "permissions, the connection), make another LogUploader with the same arguments: it goes on after them."
            ) from error

    def _chunk_with(self, seq: int) -> list[LogRecord]:
        """The records of the chunk that was there and has ``seq``, or of the first one."""
        at = self._log.locate(self._there, seq)
        while (found := list(self._log.chunk(self._there[at]).records()))[-1].seq < seq:
            at += 1  # its header is damaged, so that it was not located: to read it says so
        return found

    def _compare(self, batch: _Batch) -> None:
        """Records that were uploaded before must be the same now; those before the first chunk were collected."""
        for offset, packed in enumerate(batch.records):
            seq = batch.first_seq + offset
            if not self._known or seq > self._known[-1].seq:
                self._known = self._chunk_with(seq)
            index = seq - self._known[0].seq
            if index >= 0 and pack_record(self._known[index]) != packed:
                raise ConfigError(
                    f"Record {seq} of the {self._log} is there already, and differs: the log is another run's. Give "
                    "each run its own job name, or remove the old logs (ftcomm.recovery.global_store.remove)."
                )
