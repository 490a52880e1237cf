"""SIGTERM as a preemption notice: the worker finishes its step and leaves at the next join point.

``ftcomm.torch.join_point`` asks :func:`requested` once a step. The handler is installed by the first such question and not
earlier: a script without a join point would otherwise ignore SIGTERM for good.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_requested = False
_installed = False


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True


def install() -> bool:
    """Take SIGTERM as a notice from now on; False where the script has its own handler or this is not the main thread."""
    global _installed
    if _installed:
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTERM, _on_sigterm)
    _installed = True
    return True


def requested() -> bool:
    """True once SIGTERM came: the caller should leave the job and exit with status 0."""
    install()
    return _requested


def request() -> None:
    """What a SIGTERM does, for scripts with a handler of their own."""
    global _requested
    _requested = True
