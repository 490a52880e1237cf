"""SIGTERM to ftrun under the policy replay: at which step all stop.

They do not meet at each step, as replicas do, and a decision that depends on a signal would not come out the same when it is
replayed. So each that was told writes down in the run folder which step it is about to begin, and goes on. When all have done so
the last step is two after the highest of them. Nobody has passed it then: who begins step n has seen everybody in step n - 1, as
no step ends for anybody before all have begun it (a stage's gradients come from all behind it, its inputs from all before it).
So when the last one writes n the others are at n + 1 at most, and at n + 2 they find all there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import FrameType

from ftcomm.launch import preempt

__all__ = ["Stopping"]

_AHEAD = 2


class Stopping:
    """One rank's part. SIGTERM that is not for all ranks of the job ends the process as ever: it is replaced, or the job is over.

    Nothing is done where the script has a handler of its own, or for another thread than the main one.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._all = rank, frozenset(range(size))
        self._told = self._posted = False
        self._last: int | None = None
        self._handles = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._handles:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def close(self) -> None:
        """From now on SIGTERM ends the process."""
        if self._handles:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
            self._end()  # the stages do not keep step with each other: no checkpoint of this moment can be had
        return step == self._last

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if preempt.notice() >= self._all:
            self._told = True
        else:
            self._end()

    def _end(self) -> None:
        self.close()
        os.kill(os.getpid(), signal.SIGTERM)


def _post(rank: int) -> Path:
    return preempt.folder() / f"preempted-at-{rank}"
