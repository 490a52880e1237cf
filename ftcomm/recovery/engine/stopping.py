"""SIGTERM to ftrun under the policy replay: at which step all stop.

They do not meet at each step, as replicas do, and a decision that depends on a signal would not come out the same when it is
replayed. So each that was told writes down in the run folder which step it is about to begin, and goes on. When all have done so
the last step is two after the highest of them. Nobody has passed it then: who begins step n has seen everybody in step n - 1, as
no step ends for anybody before all have begun it (a stage's gradients come from all behind it, its inputs from all before it).
So when the last one writes n the others are at n + 1 at most, and at n + 2 they find all there.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from pathlib import Path
from types import FrameType

from ftcomm.launch import preempt

__all__ = ["Stopping"]

_AHEAD = 2
_NOTICE_WITHIN = 1.0  # seconds


class Stopping:
    """One rank's part. SIGTERM that is not for all ranks of the job ends the process as ever: it is replaced, or the job is over.

    Whoever stops a service or a container sends it to all processes at once, and the workers may have it before ftrun has, which
    then leaves its notice and sends it again. So a process that finds no notice ends a second later.

    Nothing is done where the script has a handler of its own, or for another thread than the main one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._all = rank, frozenset(range(size))
        self._told = self._posted = False
        self._asked = False
        self._closed = threading.Event()
        self._last: int | None = None
        self._handler = self._on_sigterm  # one object: a bound method is a new one each time
        self._handles = preempt.take(self._handler)

    def close(self, over: bool) -> None:
        """``over``: the loop is; from now on SIGTERM ends the process, and at once if it came when no step was left to stop at.

        Else an exception ends it. One that leaves as all do may have the signal still on its way.
        """
        self._closed.set()
        if self._handles and (over or not self._told):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if over and self._asked:
                preempt.end()
        self._handles = False

    def before(self, step: int) -> bool:
        """Whether all leave before this step, which this rank is about to begin."""
        if not self._told:
            return False
        if not self._posted:
            self._posted = True
            preempt.write_whole(_post(self._rank), str(step))
        if self._last is None:
            with contextlib.suppress(OSError, ValueError):  # not all are there
                self._last = max(int(_post(rank).read_text()) for rank in self._all) + _AHEAD
        if self._last is not None and step > self._last:
            preempt.end()  # the stages do not keep step with each other: no checkpoint of this moment can be had
        return step == self._last

    def postpone(self) -> None:
        """All go one step further. Called by all, before the same step."""
        assert self._last is not None
        self._last += 1

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if preempt.notice() >= self._all:
            self._told = True
        elif first:  # no threading.Thread: its start() takes locks, which the interrupted code may hold
            _thread.start_new_thread(self._wait_for_notice, ())

    def _wait_for_notice(self) -> None:
        """If there is one by now, the signal that comes after it says the rest."""
        if not self._closed.wait(_NOTICE_WITHIN) and not preempt.notice() >= self._all:
            preempt.end()


def _post(rank: int) -> Path:
    return preempt.folder() / f"preempted-at-{rank}"
