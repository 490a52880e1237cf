"""One process for each rank of a benchmark: the same command again, with RANK and FOLDER in its environment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

from ftcomm.launch.parent import die_with_launcher


def meeting_place(number: int) -> dict[str, str]:
    """Environment for torch's env:// on this host, at a port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}


def run_ranks(number: int, *, through: Sequence[Sequence[str]] = (), **environment: str) -> NoReturn:
    """Starts them, waits, and exits with the worst of their codes.

    through: for each rank what its command follows, such as `nsenter` and its options.

    FOLDER is in shared memory, for the rendezvous and for logs; it goes with this process, also when that is told to end.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        base = {**os.environ, **environment, "FOLDER": folder}
        command, with_this = [sys.executable, *sys.argv], die_with_launcher()
        ranks = [
            subprocess.Popen([*before, *command], env={**base, "RANK": str(r)}, preexec_fn=with_this)  # noqa: PLW1509
            for r, before in enumerate(through or [()] * number)
        ]
        try:
            code = max(process.wait() for process in ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    sys.exit(code)
