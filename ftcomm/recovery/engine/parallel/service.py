"""A survivor's side: a thread that computes micro-batches for replacements of other stages while its own stage waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from ftcomm.job import Job
from ftcomm.recovery.engine.lines import Server
from ftcomm.recovery.engine.message import Packed, receive, send, unpack
from ftcomm.recovery.engine.parallel.work import compute, differing, settings

__all__ = ["NAME", "Service"]

NAME = "parallel-replay"


class Service(Server):
    """Serves any number of replacements at once, each in a thread.

    Args:
        replaying: this process does steps again itself, and has no time.
    """

    def __init__(self, job: Job, replaying: Callable[[], bool]) -> None:
        self._job, self._replaying = job, replaying
        self._computing = (
            threading.Lock()
        )  # torch's switches (kernels, oneDNN), which a module may turn, are the process's
        super().__init__(job, NAME, lambda line: self._help(line.socket))

    def _help(self, line: socket.socket) -> None:
        greeting = receive(line)
        differ = differing(settings(), greeting["settings"])
        refusal = "it does steps again itself" if self._replaying() else ", ".join(differ)
        send(line, refusal)
        if refusal:
            return
        count, busy = 0, 0.0
        try:
            while True:
                structure, tensors = receive(line)
                items = receive(line)
                if not count:
                    self._job.emit("helping", slot=greeting["rank"])
                module, loss_of = unpack(Packed(structure, tensors))
                for item in items:
                    with self._computing:
                        start = time.monotonic()
                        done = compute(module, loss_of, item)
                        busy += time.monotonic() - start
                    send(line, done)
                    count += 1
        except (OSError, EOFError):
            raise
        except Exception as error:  # noqa: BLE001 - of the module, here: the replacement finds out whether it has it, too
            send(line, f"{type(error).__name__}: {error}")
        finally:
            if count:
                self._job.emit("helped", slot=greeting["rank"], micro_batches=count, busy=round(busy, 6))
