"""Torch's own dynamic rendezvous, in a thread: who waits in it may do something else meanwhile, and take a place instead."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, dynamic_rendezvous


def name_methods_quickly() -> None:
    """Of whom torch's own event of each step of a rendezvous is. To find that out torch reads the source lines of all frames
    on the stack, twice: a quarter of a second of each start of workers, and longer where many modules are loaded."""
    if hasattr(dynamic_rendezvous, "get_method_name"):
        dynamic_rendezvous.get_method_name = method_name


def method_name(depth: int = 2) -> str:
    """What torch's ``get_method_name`` gives."""
    return sys._getframe(depth).f_code.co_name


class _Ended(Exception):
    """Ends the thread."""


class Meeting:
    """Begun when it is made, and again whenever it has ended and there is to be another round."""

    def __init__(self, handler: RendezvousHandler, meet: Callable[[], RendezvousInfo]) -> None:
        """``meet``: the handler's own ``next_rendezvous``."""
        self._handler, self._meet = handler, meet
        self._met: queue.SimpleQueue[RendezvousInfo | BaseException] = queue.SimpleQueue()
        self.begin()

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="ftrun-rendezvous", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> RendezvousInfo | BaseException | None:
        """How it has ended; None: not yet."""
        try:
            return self._met.get(timeout=seconds)
        except queue.Empty:
            return None

    def end(self) -> None:
        """Else it went on, and would be a node of another round, should there be one."""

        def sync() -> bool | None:
            raise _Ended

        holder = self._handler._state_holder
        before, holder.sync = holder.sync, sync
        self._thread.join(5.0)
        holder.sync = before

    def _run(self) -> None:
        try:
            self._met.put(self._meet())
        except _Ended:
            return
        except BaseException as error:  # noqa: BLE001 - for the other thread
            self._met.put(error)
