"""What the ftruns of several nodes know of each other: that they are there, and how their workers ended."""

from __future__ import annotations

import contextlib
import os
import queue
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
    UNKNOWN = "unknown"  # the store has gone before anything was known


class Nodes:
    """In the rendezvous store each node counts up its beat while its workers run, and says in the end how they ended.

    The store lives in one node's ftrun and may hold the membership of the job, so that one has to outlast all others; but
    it must not wait for a node that has died without a word.
    """

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store, self._node, self._nodes = store, node, nodes
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="ftrun-beat", daemon=True)
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable when a node has failed
        self._failed: queue.SimpleQueue[int] = queue.SimpleQueue()

    def begin(self) -> None:
        self._beats.start()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone; who needs it finds out
            going = [n for n in range(self._nodes) if n != self._node]
            while True:
                self._store.add(f"ftrun/beat/{self._node}", 1)
                for other in [n for n in going if self._store.check([f"ftrun/end/{n}"])]:
                    going.remove(other)
                    if self._end_of(other) is End.FAILED:
                        self._failed.put(other)
                        os.eventfd_write(self.fd, 1)
                if self._stop.wait(BEAT):
                    return

    def failed(self) -> list[int]:
        """The nodes that have failed since it was last asked. Within two beats; none once this one has ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return [self._failed.get() for _ in range(self._failed.qsize())]

    def _end_of(self, node: int) -> End:
        return End(self._store.get(f"ftrun/end/{node}").decode())

    def end(self, how: End, stays: bool, signals: Signals) -> tuple[dict[int, End], signal.Signals | None]:
        """Says how this node's workers ended, and, if it stays, waits until all others have said it or were silent for too long.

        Returns how they ended, and the signal that came meanwhile. SIGTERM does not end the wait where the store lives here.
        """
        self._stop.set()
        read_fd, write_fd = os.pipe()
        ends = {n: End.UNKNOWN for n in range(self._nodes) if stays and n != self._node}

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
            got: signal.Signals | None = None
            while ready := selector.select(None if stays else 1.0):
                if any(key.fd == read_fd for key, _ in ready):
                    break
                for one in signals.take():
                    if one is not signal.SIGTERM or got is not None or not serves_store():
                        return ends, got or one
                    got = one  # as when it comes before: the others need the store
        return ends, got

    def _wait(self, ends: dict[int, End]) -> None:
        begun = time.monotonic()
        beats: dict[int, tuple[int, float]] = {}  # the last one, and when it was new
        missing = [n for n in range(self._nodes) if n != self._node]
        while missing:
            for other in list(missing):
                if self._store.check([f"ftrun/end/{other}"]):
                    ends[other] = self._end_of(other)
                    missing.remove(other)
                    continue
                beat, now = self._store.add(f"ftrun/beat/{other}", 0), time.monotonic()
                if other not in beats or beats[other][0] != beat:
                    beats[other] = (beat, now)
                elif now - beats[other][1] > GONE:
                    ends[other] = End.GONE
                    missing.remove(other)
            if missing:
                _pause(begun)
        self._store.set(f"ftrun/knows/{self._node}", "")
        if serves_store():  # who does goes last: others may have begun to look for who is gone just now
            there = [f"ftrun/knows/{n}" for n, end in ends.items() if end in (End.SUCCEEDED, End.FAILED)]
            since = time.monotonic()
            while not self._store.check(there) and time.monotonic() - since < GONE + 2 * BEAT:
                _pause(since)


def _pause(since: float) -> None:
    """Between two looks, of which a thread that has nothing else to do takes more at first.

    A store has a wait, which keeps others from it for as long, and prints warnings when its time is over.
    """
    time.sleep(min(1.0, 0.02 + (time.monotonic() - since) / 10))


def serves_store() -> bool:
    """Whether a store lives in this process: the rendezvous', or that of the job. Nothing else in ftrun listens."""
    return any(_listens(int(name)) for name in os.listdir("/proc/self/fd"))


def _listens(number: int) -> bool:
    try:
        fd = os.dup(number)
    except OSError:
        return False
    try:
        one = socket.socket(fileno=fd)
    except OSError:  # no socket
        os.close(fd)
        return False
    with one:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
