"""Children that do not outlive the process that started them, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Resolved before any fork: the child of a threaded process must not go through the dynamic loader.
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def die_with_launcher(by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """What a child of this process calls between fork and exec. ``by``: SIGTERM for a child that has to tidy up."""
    launcher = os.getpid()

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the prctl: the signal will not come any more
            os._exit(1)

    return prepare
