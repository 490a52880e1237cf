"""Temporary files that say by a lock whether their process still lives.

The lock tells, not a process id in the name: the process may be on another host, and after the restart of a container the id is
often one's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from typing import IO

__all__ = ["open_temporary", "remove_abandoned"]


def open_temporary(name: Callable[[], str]) -> tuple[str, IO[bytes]]:
    """A new file, locked while it is open: the lock ends with its process, however that ends.

    Args:
        name: a path that nobody else has, another one at each call.
    """
    while True:
        path = name()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody takes it for abandoned
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, open(fd, "wb")
        os.close(fd)  # someone has cleaned up between the two calls


def remove_abandoned(path: str) -> None:
    """Removes a temporary file whose process has ended; nothing happens if that is not known."""
    with contextlib.suppress(OSError):  # it is another user's, or has gone
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
