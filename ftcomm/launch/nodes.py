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

from torch.distributed import Store

from ftcomm.launch.generations import NEWS, Generations
from ftcomm.launch.places import Board, End, Place
from ftcomm.launch.signals import Signals

BEAT = 5.0  # seconds
LOOK = 0.5  # seconds between two looks of a node whose workers can't go on by themselves
GONE = 60.0  # without a beat
SURE = 10.0  # since it was seen that this node's place is this ftrun's: less than another one waits before it takes it (SILENT)


WHY = {
    End.FAILED: "a worker of node {} failed for good",
    End.INTERRUPTED: "node {} was interrupted",
    End.LEFT: "node {} was told to go (SIGTERM)",
    End.GONE: "node {} is gone, and its ftrun with it",
    End.UNKNOWN: "nothing is known of node {}: the rendezvous store is gone",
}
FAILURES = (End.FAILED, End.INTERRUPTED, End.GONE, End.UNKNOWN)


class Nodes:
    """In the rendezvous store each node counts up its beat while its workers run, and says in the end how they ended.

    The store lives in one node's ftrun and may hold the membership of the job, so that one has to outlast all others; but
    it must not wait for a node that has died without a word.
    """

    def __init__(self, store: Store, place: Place, nodes: int, replays: bool) -> None:
        self._store, self._place, self._node = store, place, place.node
        self._board = Board(store)
        self._others = [n for n in range(nodes) if n != place.node]
        self.generations = Generations(store, place.node, nodes, place.generation) if replays else None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable when there is news for the agent
        self._news: queue.SimpleQueue[tuple[int, End]] = queue.SimpleQueue()
        self._ends: dict[int, End] = {}
        self._tenants: dict[int, str | None] = {}  # of nodes that are back
        self._seen = 0  # how much there was in the store at the last look
        self._poked = False
        self._heard: dict[int, tuple[int, float]] = {}  # each node's last beat, and when it was new
        self._wake = threading.Event()
        self._stop = self._store_is_gone = self._lost_place = False
        self._sure_at, self._is_asked = time.monotonic(), False
        self._unwritten: dict[tuple[str, int | None], str] = {}  # for the board
        self._beats = threading.Thread(target=self._beat, name="ftrun-beat", daemon=True)

    def begin(self) -> None:
        self._beats.start()

    def poke(self) -> None:
        """The agent has told the generations something."""
        self._poked = True
        self._wake.set()

    def write(self, what: str, node: int | None, value: str) -> None:
        """On the board, soon: the store may be slow to answer. For whoever takes this node's place."""
        self._unwritten[what, node] = value
        self._wake.set()

    def ended(self) -> list[tuple[int, End]]:
        """The nodes that have ended without success since it was last asked, or are back; none once this node has ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return [self._news.get() for _ in range(self._news.qsize())]

    def missing(self) -> tuple[int, End] | None:
        """A node that won't say what it starts again, and why, if this one waits for that."""
        if self.generations is None or not self.generations.waits:
            return None
        ends = [(n, self._ends.get(n, End.SUCCEEDED)) for n in self.generations.silent]
        return next(((n, end) for n, end in ends if end is not End.SUCCEEDED), None)

    @property
    def store_is_gone(self) -> bool:
        return self._store_is_gone

    @property
    def others_have_succeeded(self) -> bool:
        """As far as it is known; no other node is waited for, or waits."""
        return all(self._ends.get(n) is End.SUCCEEDED for n in self._others)

    def is_sure(self) -> bool:
        """That this node's place was this ftrun's a moment ago, or that nobody can take it. If not, there will be news.

        After it was stopped it may not be, and must not start what would be in the way of another one's workers.
        """
        if self._store_is_gone or time.monotonic() - self._sure_at < SURE:
            return True
        self._is_asked = True
        self._wake.set()
        return False

    @property
    def lost_place(self) -> bool:
        """Another ftrun starts this node's workers from now on."""
        return self._lost_place

    def _beat(self) -> None:
        try:
            next_beat = 0.0
            while not self._stop:
                if (now := time.monotonic()) >= next_beat:
                    self._store.add(f"ftrun/beat/{self._node}", 1)
                    next_beat = now + BEAT
                began = time.monotonic()
                if self._has_lost_place():
                    return
                self._sure_at = began
                if self._is_asked:
                    self._is_asked = False
                    os.eventfd_write(self.fd, 1)
                self._write_all()
                self._look()
                waits = self.generations is not None and self.generations.lacks_members
                self._wake.wait(LOOK if waits else BEAT)
                self._wake.clear()
        except RuntimeError:
            self._store_is_gone = True
            os.eventfd_write(self.fd, 1)

    def _has_lost_place(self) -> bool:
        if self._board.read("tenant", self._node) == self._place.tenant:
            return False
        self._lost_place = True
        os.eventfd_write(self.fd, 1)
        return True

    def _write_all(self) -> None:
        while self._unwritten:
            key, value = self._unwritten.popitem()
            self._board.write(*key, value)

    def _look(self) -> None:
        """At what all nodes write, when it is more than it was."""
        news, self._poked = self._poked, False
        if (there := self._store.add(NEWS, 0)) != self._seen:
            self._seen, news = there, True
            for other in self._others:
                self._look_at(other, self._board.read("end", other))
        if self.generations is None:
            return
        if self.generations.lacks_members:
            for other in [n for n in self._going() if self._is_silent(n)]:
                self._ends[other], news = End.GONE, True
        if news:
            finished = {n for n, end in self._ends.items() if end is End.SUCCEEDED}
            self.generations.look(finished, self._ends.keys() - finished)
            os.eventfd_write(self.fd, 1)

    def _look_at(self, other: int, said: str | None) -> None:
        end = None if said is None else End(said)
        if end is End.BACK:
            tenant = self._board.read("tenant", other)
            if tenant == self._tenants.get(other):
                return
            self._tenants[other] = tenant
            self._ends.pop(other, None)
            self._heard.pop(other, None)
        elif end is None or end is self._ends.get(other):
            return
        else:
            self._ends[other] = end
        if end is not End.SUCCEEDED:
            self._news.put((other, end))
        os.eventfd_write(self.fd, 1)

    def _going(self) -> list[int]:
        return [n for n in self._others if n not in self._ends]

    def end(self, how: End, stays: bool, signals: Signals) -> tuple[dict[int, End], signal.Signals | None]:
        """Says how this node's workers ended, and, if it stays, waits until all others have said it or were silent for too long.

        Returns how they ended, and the signal that came meanwhile. SIGTERM does not end the wait where the store lives here.
        """
        self._stop = True
        self._wake.set()
        leave = threading.Event()
        if not stays:
            leave.set()
        read_fd, write_fd = os.pipe()
        ends = {n: End.UNKNOWN for n in self._others if stays}

        def wait() -> None:
            try:
                with contextlib.suppress(RuntimeError):
                    if self._has_lost_place():
                        return
                    self._board.write("end", self._node, how.value)
                    self._board.tell()
                    self._wait(ends, leave)
                    self._store.set(f"ftrun/knows/{self._node}", "")
                    if serves_store():
                        self._wait_for_knowing(ends, leave)
            finally:
                os.write(write_fd, b".")

        threading.Thread(target=wait, name="ftrun-exit", daemon=True).start()  # the store may be slow to answer
        with selectors.DefaultSelector() as selector:
            selector.register(read_fd, selectors.EVENT_READ)
            selector.register(signals.fd, selectors.EVENT_READ)
            got: signal.Signals | None = None
            while ready := selector.select(1.0 if leave.is_set() else None):
                if any(key.fd == read_fd for key, _ in ready):
                    break
                for one in signals.take():
                    if one is not signal.SIGTERM or got is not None or not serves_store():
                        leave.set()
                    got = got or one  # SIGTERM as when it comes before: the others need the store
        return ends, got

    def _wait(self, ends: dict[int, End], leave: threading.Event) -> None:
        begun = time.monotonic()
        missing = list(self._others)
        while missing and not leave.is_set():
            for other in list(missing):
                if (end := self._board.end_of(other)) is not None:
                    ends[other] = end
                    missing.remove(other)
                elif self._is_silent(other):
                    ends[other] = End.GONE
                    missing.remove(other)
            if missing:
                _pause(begun, leave)

    def _wait_for_knowing(self, ends: dict[int, End], leave: threading.Event) -> None:
        """Who serves the store goes last: others may have begun to look for who is gone just now."""
        there = [f"ftrun/knows/{n}" for n, end in ends.items() if end not in (End.GONE, End.UNKNOWN)]
        since = time.monotonic()
        while not leave.is_set() and not self._store.check(there) and time.monotonic() - since < GONE + 2 * BEAT:
            _pause(since, leave)

    def _is_silent(self, other: int) -> bool:
        """Its beats are counted: clocks of other hosts say nothing."""
        beat, now = self._store.add(f"ftrun/beat/{other}", 0), time.monotonic()
        if other not in self._heard or self._heard[other][0] != beat:
            self._heard[other] = (beat, now)
        return now - self._heard[other][1] > GONE


def _pause(since: float, leave: threading.Event) -> None:
    """Between two looks, of which a thread that has nothing else to do takes more at first.

    A store has a wait, which keeps others from it for as long, and prints warnings when its time is over.
    """
    leave.wait(min(1.0, 0.02 + (time.monotonic() - since) / 10))


def nobody_listens(address: str, port: int) -> bool:
    """Any more: whoever did has ended. Of a host that does not answer nothing is known."""
    try:
        with socket.create_connection((address, port), 1.0):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


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
