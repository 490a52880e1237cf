"""Signals of ftrun as a file descriptor: the agent waits for them as for everything else."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException

# If they are ignored: by nohup, and by shells for what runs in the background.
_IGNORED_STAY = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_PATIENCE = 3.0  # seconds for what a signal has interrupted to come to its end
# Two that nobody can handle, and the one by which ftrun hears of its workers' deaths.
_NOT_TO_HANDLE = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


class Signals:
    """Collects the handled signals and SIGCHLD; ``fd`` is readable when one has come.

    Until :meth:`collect` is called a handled signal raises SignalException instead: nothing is there yet to end in order,
    and the rendezvous must not go on. What ftrun's starter has it ignore, so that it survives a logout, it goes on ignoring.
    """

    def __init__(self, handled: list[signal.Signals]) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pending: list[signal.Signals] = []
        self._collecting = False
        self._watch: threading.Thread | None = None
        handled = [s for s in handled if s not in _IGNORED_STAY or signal.getsignal(s) is not signal.SIG_IGN]
        self._before = {sig: signal.signal(sig, self._on_signal) for sig in handled}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # Whoever has started ftrun may have blocked them: no worker's death would be heard of, and nothing would end it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *handled})

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        sig = signal.Signals(signum)
        if not self._collecting:
            raise SignalException(f"ftrun got {sig.name}", sigval=sig)
        self._pending.append(sig)

    def collect(self) -> None:
        """From now on :meth:`take` tells which signals came."""
        self._collecting = True
        if self._watch is not None:
            os.close(self._watched)
            self._watch.join()  # for ever if it ends the process just now
            self._watch = None
            os.write(self._write_fd, b"\0")  # it may have read what made `fd` readable

    def interrupt(self, cut_short: Callable[[signal.Signals], NoReturn]) -> None:
        """From now on a signal raises again, at once if one has come meanwhile.

        ``cut_short(sig)`` ends the process where that does not lead to :meth:`collect` within a few seconds, from another thread:
        while the main one connects to a store, or waits there for other nodes, it is in torch's C++ code, and no handler runs.
        """
        over, self._watched = os.pipe2(os.O_CLOEXEC)
        self._watch = threading.Thread(target=self._cut_short_later, args=(over, cut_short), daemon=True)
        self._watch.start()
        self._collecting = False  # only now: what a signal interrupts leads to collect(), which ends the watch
        for sig in self.take():
            self._on_signal(sig, None)

    def _cut_short_later(self, over: int, cut_short: Callable[[signal.Signals], NoReturn]) -> None:
        came, ends = select.poll(), select.poll()
        came.register(self.fd, select.POLLIN)
        for poller in (came, ends):
            poller.register(over, select.POLLHUP)
        while all(fd != over for fd, _ in came.poll()):
            signals = [s for s in self._read() if s in self._before and s != signal.SIGCHLD]
            if signals and not ends.poll(_PATIENCE * 1000):
                cut_short(signal.Signals(signals[0]))
        os.close(over)

    def take(self) -> list[signal.Signals]:
        """Handled signals since the last call; empties ``fd``."""
        while self._read():
            pass
        taken, self._pending = self._pending, []
        return taken

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, 4096)
        except BlockingIOError:  # also where the other thread was first
            return b""

    def close(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for sig, handler in self._before.items():
            signal.signal(sig, handler)
        os.close(self.fd)
        os.close(self._write_fd)


def parse_signals(text: str) -> list[signal.Signals]:
    """``"SIGTERM,SIGINT"`` -> the signals; ValueError names what is none, or can't be handled."""
    try:
        handled = [signal.Signals[name.strip()] for name in text.split(",") if name.strip()]
    except KeyError as error:
        raise ValueError(f"--signals-to-handle: {error.args[0]!r} is no signal; an example is SIGTERM,SIGINT") from None
    for sig in handled:
        if sig in _NOT_TO_HANDLE:
            raise ValueError(f"--signals-to-handle: {sig.name} can't be handled; an example is SIGTERM,SIGINT")
    return handled
