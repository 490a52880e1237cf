"""Signal handlers that raise where a test wants them to."""

from __future__ import annotations

import signal
from typing import Any


def raise_in_the_wait(error: BaseException) -> None:
    """From now on SIGINT and SIGUSR2 raise `error` in a wait of the direct API.

    One that comes a few lines too early or too late is sent again (as an alarm), so that a test always hits the wait.
    """

    def handler(signum: int, frame: Any) -> None:
        innermost = frame.f_code.co_name
        while frame is not None:
            if innermost == "finish_now" or frame.f_code.co_name == "_wait_until":
                raise error
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    for signum in (signal.SIGINT, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(signum, handler)
