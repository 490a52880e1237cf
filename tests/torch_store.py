"""torch's own TCPStore in a process that outlives every rank, as a launcher's agent does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import Pipe

import torch.distributed as dist
from harness import after_fork


def serve() -> Iterator[tuple[str, int]]:
    """For a fixture: yields the address."""
    here, there = Pipe()
    pid = os.fork()
    if pid == 0:
        here.close()
        after_fork()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        there.send(store.port)
        with contextlib.suppress(EOFError):
            there.recv()
        os._exit(0)
    there.close()
    yield "127.0.0.1", here.recv()
    here.close()
    os.waitpid(pid, 0)
