"""A store in one shared file (``file://path``): an append-only log of records under a lock.

``flock`` works between the processes of a host and over NFSv4. A change made on another host causes no event here, so
``wait`` looks again after a short, growing pause; it is the one place in ftcomm that does so, and only before the job has
started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

from ftcomm.errors import ConfigError
from ftcomm.stores import MAX_KEY, MAX_VALUE, Store

__all__ = ["FileStore"]

_HEADER = struct.Struct("<4sIII")  # magic, crc of the rest, key length, value length
_MAGIC = b"FTS1"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class FileStore(Store):
    """The file is created if it does not exist. It stays after the job: remove it, or name the job (FTCOMM_JOB), before
    the same path is used again."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"The rendezvous file {path} can't be opened ({error.strerror}). Give file:// a path in a folder that "
                "exists and that every rank can write to."
            ) from None
        self._values: dict[str, bytes] = {}
        self._parsed = 0
        self._thread_lock = threading.Lock()  # flock is per descriptor: it does not keep threads apart

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        with self._thread_lock:
            if self._fd < 0:
                raise ConfigError(f"The store in {self.path} was closed.")
            fcntl.flock(self._fd, kind)
            try:
                self._catch_up()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        """Reads the records that were appended since the last time; stops at a half-written one."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size - self._parsed, self._parsed)
        at = 0
        while at + _HEADER.size <= len(data):
            magic, crc, key_length, value_length = _HEADER.unpack_from(data, at)
            if magic != _MAGIC or key_length > MAX_KEY or value_length > MAX_VALUE:
                raise ConfigError(
                    f"{self.path} is not an ftcomm rendezvous file (byte {self._parsed + at}). Remove it or use another path."
                )
            body = data[at + _HEADER.size : at + _HEADER.size + key_length + value_length]
            if len(body) < key_length + value_length or zlib.crc32(body) != crc:
                break
            self._values[body[:key_length].decode()] = body[key_length:]
            at += _HEADER.size + len(body)
        self._parsed += at

    def _append(self, key: str, value: bytes) -> None:
        body = key.encode() + value
        record = _HEADER.pack(_MAGIC, zlib.crc32(body), len(body) - len(value), len(value)) + body
        os.ftruncate(self._fd, self._parsed)  # a writer that was killed in mid-record left a tail
        os.pwrite(self._fd, record, self._parsed)
        self._parsed += len(record)
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        with self._locked(fcntl.LOCK_SH):
            return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        with self._locked(fcntl.LOCK_EX):
            self._append(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._locked(fcntl.LOCK_EX):
            if self._values.get(key, b"") == expected:
                self._append(key, desired)
            return self._values.get(key, b"")

    def wait(self, keys: Sequence[str], timeout: float) -> list[str]:
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            with self._locked(fcntl.LOCK_SH):
                missing = [key for key in keys if key not in self._values]
            left = deadline - time.monotonic()
            if not missing or left <= 0:
                return missing
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        with self._thread_lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
