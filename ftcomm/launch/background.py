"""Writes text without making anybody wait: whoever reads what ftrun says may stand still (Ctrl-S, a stalled log driver)."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

LINES = 1000  # that wait for the reader
PATIENCE = 1.0  # seconds, at the end


class BackgroundWriter:
    """As much of a text file as the narrator needs. What has no room is left out, and then it is said how much."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._left_out = 0
        self._waiting: queue.Queue[str | None] = queue.Queue(LINES)
        self._thread = threading.Thread(target=self._run, name="ftrun-says", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        try:
            self._waiting.put_nowait(self._about_left_out() + text)
            self._left_out = 0
        except queue.Full:
            self._left_out += 1

    def flush(self) -> None:
        """It is on its way."""

    def _about_left_out(self) -> str:
        return f"ftrun: {self._left_out} lines are missing here: nobody read them in time\n" if self._left_out else ""

    def _run(self) -> None:
        # Not by sys.stderr: it would stay locked, and the interpreter could not end.
        while (text := self._waiting.get()) is not None:
            data = text.encode(errors="replace")
            with contextlib.suppress(OSError):  # nobody reads any more, or the terminal is gone: the run goes on
                while data:
                    data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Waits a moment for a reader that is slow."""
        until = time.monotonic() + PATIENCE
        with contextlib.suppress(queue.Full):
            for last in (self._about_left_out(), None):
                self._waiting.put(last, timeout=max(0.0, until - time.monotonic()))
            self._thread.join(max(0.0, until - time.monotonic()))
