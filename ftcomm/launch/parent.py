"""Children that do not outlive the process that started them, however it ends, and have its limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Resolved before any fork: the child of a threaded process must not go through the dynamic loader.
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
# The limit on open files that this process was started with, where it has raised it.
_files: tuple[int, int] | None = None


def raise_file_limit() -> None:
    """As many open files as this process may have: ftrun needs some for each worker. Children get what it was started with."""
    global _files
    soft, hard = limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    with contextlib.suppress(OSError, ValueError):  # above what the kernel has as its highest
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _files = limit


def die_with_launcher(by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """What a child of this process calls between fork and exec. ``by``: SIGTERM for a child that has to tidy up."""
    launcher = os.getpid()

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the prctl: the signal will not come any more
            os._exit(1)
        if _files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, _files)

    return prepare
