"""What the ftruns of several nodes know of each other: that they are there, and how their workers ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from enum import Enum

from torch.distributed import Store

from ftcomm.launch.signals import Signals

BEAT = 5.0  # seconds
GONE = 60.0  # without a beat


class End(Enum):
    """How a node's workers ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # a slot was given up
    LEFT = "left"  # SIGTERM: the machine is taken away
    GONE = "gone"  # not said by itself: its ftrun has died


class Nodes:
    """In the rendezvous store each node counts up its beat while its workers run, and says in the end how they ended.

    The store lives in one node's ftrun and may hold the membership of the job, so that one has to outlast all others; but
    it must not wait for a node that has died without a word.
    """

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store, self._node, self._nodes = store, node, nodes
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="ftrun-beat", daemon=True)

    def begin(self) -> None:
        self._beats.start()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone; who needs it finds out
            self._store.add(f"ftrun/beat/{self._node}", 1)
            while not self._stop.wait(BEAT):
                self._store.add(f"ftrun/beat/{self._node}", 1)

    def end(self, how: End, stays: bool, signals: Signals) -> tuple[dict[int, End], signal.Signals | None]:
        """Says how this node's workers ended, and, if it stays, waits until all others have said it or were silent for too long.

        Returns how they ended, and the signal that ended the wait. Of whom nothing is known any more as the store is gone
        there is nothing in it.
        """
        self._stop.set()
        read_fd, write_fd = os.pipe()
        ends: dict[int, End] = {}

        def wait() -> None:
            try:
                with contextlib.suppress(RuntimeError):
                    self._store.set(f"ftrun/end/{self._node}", how.value)
                    if stays:
                        self._wait(ends)
            finally:
                os.write(write_fd, b".")

        threading.Thread(target=wait, name="ftrun-exit", daemon=True).start()  # the store may be slow to answer
        with selectors.DefaultSelector() as selector:
            selector.register(read_fd, selectors.EVENT_READ)
            selector.register(signals.fd, selectors.EVENT_READ)
            while ready := selector.select(None if stays else 1.0):
                if any(key.fd == read_fd for key, _ in ready):
                    break
                if taken := signals.take():
                    return ends, taken[0]
        return ends, None

    def _wait(self, ends: dict[int, End]) -> None:
        for other in range(self._nodes):
            if other != self._node:
                ends[other] = self._end_of(other)
        self._store.set(f"ftrun/knows/{self._node}", "")
        if serves_store():  # who does goes last
            there = [f"ftrun/knows/{n}" for n, end in ends.items() if end in (End.SUCCEEDED, End.FAILED)]
            since = time.monotonic()
            while not self._store.check(there) and time.monotonic() - since < BEAT:
                _pause(since)

    def _end_of(self, other: int) -> End:
        begun = since = time.monotonic()
        heard = -1
        while not self._store.check([f"ftrun/end/{other}"]):
            beat, now = self._store.add(f"ftrun/beat/{other}", 0), time.monotonic()
            if beat != heard:
                heard, since = beat, now
            elif now - since > GONE:
                return End.GONE
            _pause(begun)
        return End(self._store.get(f"ftrun/end/{other}").decode())


def _pause(since: float) -> None:
    """Between two looks, of which a thread that has nothing else to do takes more at first.

    A store has a wait, which keeps others from it for as long, and prints warnings when its time is over.
    """
    time.sleep(min(1.0, 0.02 + (time.monotonic() - since) / 10))


def serves_store() -> bool:
    """Whether a store lives in this process: the rendezvous', or that of the job. Nothing else in ftrun listens."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return True
    return False
