"""Where checkpoints are kept. The only part that knows it is a folder: a remote memory can take its place.

Every call raises the OSError that it met; who calls knows what it means.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable
from typing import IO, Protocol

from ftcomm.recovery._temporary import open_temporary, remove_abandoned

__all__ = ["Files", "LocalFiles"]


class Files(Protocol):
    """Files under names. ``where`` is for messages."""

    where: str

    def put(self, fill: Callable[[IO[bytes]], str]) -> str:
        """Makes a file, at once or not at all, and returns its name when it is durable.

        ``fill`` writes its bytes and says its name, which depends on them. A file of that name is replaced.
        """

    def names(self) -> list[str]:
        """Of all files, the one written last at the end."""

    def open(self, name: str) -> IO[bytes]:
        """For reading; it can seek."""

    def remove(self, name: str) -> None:
        """Nothing happens if it is not there."""


class LocalFiles:
    """A folder, which is made if it is not there. Names beginning with a dot and ``name`` are its temporary files."""

    def __init__(self, folder: str, name: str) -> None:
        self.where = folder
        self._name = name
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
            _sync(os.path.dirname(os.path.abspath(folder)))
        self._remove_abandoned()

    def put(self, fill: Callable[[IO[bytes]], str]) -> str:
        path, file = self._temporary()
        try:
            try:
                name = fill(file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(path, os.path.join(self.where, name))
            finally:
                with contextlib.suppress(OSError):  # flush() and fsync() have said what there is to say
                    file.close()
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        _sync(self.where)
        return name

    def names(self) -> list[str]:
        found = []
        with os.scandir(self.where) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    if entry.is_file():
                        found.append((entry.stat().st_mtime_ns, entry.name))
        return [name for _, name in sorted(found)]

    def open(self, name: str) -> IO[bytes]:
        return open(os.path.join(self.where, name), "rb")

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.where, name))

    def _temporary(self) -> tuple[str, IO[bytes]]:
        start = os.path.join(self.where, f".{self._name}-{os.getpid()}-")
        return open_temporary(lambda: f"{start}{secrets.token_hex(8)}.tmp")

    def _remove_abandoned(self) -> None:
        """Removes what killed processes left."""
        mine = re.compile(rf"\.{re.escape(self._name)}-\d+-[0-9a-f]{{16}}\.tmp")
        for name in os.listdir(self.where):
            if mine.fullmatch(name):
                remove_abandoned(os.path.join(self.where, name))


def _sync(folder: str) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing
            raise
    finally:
        os.close(fd)
