"""SIGTERM as a preemption notice: the worker finishes its step and leaves at the next join point.

``ftcomm.torch.join_point`` asks :func:`told` once a step. The handler is installed by the first such question and not
earlier: a script without a join point would otherwise ignore SIGTERM for good. A forked child has no join point: SIGTERM ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType

_signal = ctypes.CDLL(None).signal  # Python's own is for the main thread only
_signal.argtypes, _signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
_requested = False
_interrupts = False
_ours: Callable[[int, FrameType | None], None] | None = None  # the handler that was installed last
_pid = 0  # by which process


class Preempted(BaseException):
    """SIGTERM came within :func:`interrupting`."""


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    global _requested, _interrupts
    if os.getpid() != _pid:  # in a child, before _in_child has run
        end()
        return
    _requested = True
    if _interrupts:
        _interrupts = False  # once
        raise Preempted


def install() -> bool:
    """Take SIGTERM as a notice from now on; False where the script has its own handler or this is not the main thread."""
    present = signal.getsignal(signal.SIGTERM)  # and no variable of ours: a forked process may have set it back
    return present is _on_sigterm or take(_on_sigterm)


def take(handler: Callable[[int, FrameType | None], None]) -> bool:
    """``handler`` gets SIGTERM; False where the script has its own handler or this is not the main thread."""
    global _ours, _pid
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not default or threading.current_thread() is not threading.main_thread():
        return False
    _ours, _pid = handler, os.getpid()
    signal.signal(signal.SIGTERM, handler)
    return True


def end() -> None:
    """As SIGTERM does it where nobody handles it. In any thread: the main one may be in a wait of torch's."""
    _signal(signal.SIGTERM, None)  # SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)


def uninstall() -> None:
    """Nobody will ask any more: SIGTERM ends the process as ever, and at once if it has come since the last question."""
    if signal.getsignal(signal.SIGTERM) is _on_sigterm and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if _requested:
            end()


def requested() -> bool:
    """True once SIGTERM came: the caller should leave the job and exit with status 0."""
    install()
    return _requested


def request() -> None:
    """What a SIGTERM does, for scripts with a handler of their own."""
    global _requested
    _requested = True


def told(rank: int) -> frozenset[int]:
    """Who is to leave, as far as this process knows: itself once SIGTERM came; all workers of its ftrun if that got it.

    torchrun leaves no notice, and passes its own SIGTERM on to one worker after another: if it is one node's, all are to leave.
    Else those that hear it late would train a step without the others. Of several nodes, the others' wait for this one's dead.
    """
    if not requested():
        return frozenset()
    all_on_node = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
    if all_on_node and "TORCHELASTIC_RUN_ID" in os.environ and "FTCOMM_INCARNATION" not in os.environ:
        return frozenset(range(int(os.environ["WORLD_SIZE"])))
    return notice() | {rank}


def notice() -> frozenset[int]:
    """Workers that this one's ftrun has passed SIGTERM on to, as it came to itself."""
    with contextlib.suppress(OSError, ValueError):
        return frozenset(json.loads(_notice(folder(), _node()).read_text()))
    return frozenset()


@contextlib.contextmanager
def interrupting(again: bool = False) -> Iterator[None]:
    """Within it SIGTERM raises :class:`Preempted`, also if it came before: for waits that nobody else ends.

    ``again``: only another one, as ftrun may be told after one of its workers.
    """
    global _interrupts
    _interrupts = True
    try:
        if requested() and not again:
            raise Preempted
        yield
    finally:
        _interrupts = False


def leave_notice(where: Path, node: int, ranks: Collection[int]) -> None:
    """ftrun's part, before it passes SIGTERM on: each of its workers that hears it tells the others that all of them are to go.

    Else those that hear it one step earlier would leave earlier, and the others would train that step without them.
    """
    write_whole(_notice(where, node), json.dumps(sorted(ranks)))


def remove_notices(where: Path) -> None:
    """Of an earlier run in the same folder."""
    for path in where.glob("preempted-*"):
        path.unlink(missing_ok=True)


def folder() -> Path:
    """The run folder, of a worker."""
    return Path(os.environ.get("FTCOMM_EVENTS", ""))


def write_whole(path: Path, text: str) -> None:
    """A reader sees all of it or no file."""
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    os.replace(scratch, path)


def _in_child() -> None:
    global _requested, _ours
    if _ours is not None and signal.getsignal(signal.SIGTERM) is _ours:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _requested, _ours = False, None


os.register_at_fork(after_in_child=_in_child)


def _notice(where: Path, node: int) -> Path:
    return where / f"preempted-{node}.json"


def _node() -> int:
    return int(os.environ.get("GROUP_RANK", "0"))
