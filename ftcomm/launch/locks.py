"""Locks that show that a folder has an owner: the kernel frees them when the process is dead, however it died."""

from __future__ import annotations

import errno
import fcntl


def try_lock(fd: int) -> bool:
    """Locks the file for this process alone. False: another one has it. True also on a file system without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True
