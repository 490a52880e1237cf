"""What the ftruns of several nodes know of each other: that they are there, and how their workers ended."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import threading
import time

from torch.distributed import Store

from ftcomm.launch.generations import Generations
from ftcomm.launch.places import End, Place, Places, Silence
from ftcomm.launch.signals import Signals
from ftcomm.launch.store import is_served, own_connection, serves_store

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
        self._place, self._node = place, place.node
        self._board = Places(own_connection(store))
        self._others = [n for n in range(nodes) if n != place.node]
        self.generations = Generations(self._board, place.node, nodes, place.generation) if replays else None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable when there is news for the agent
        self._news: queue.SimpleQueue[tuple[int, End]] = queue.SimpleQueue()
        self._ends: dict[int, End] = {}
        self._numbers = {n: 1 if place.is_first else self._board.number(n) for n in self._others}  # of their tenants
        self._seen = 0  # how much there was in the store at the last look
        self._poked = False
        self._heard: dict[int, Silence] = {}
        self._wake = threading.Event()
        self._stop = self._store_is_gone = self._lost_place = False
        self._sure_at, self._is_asked = _now(), False
        self._asked_at, self._unsure = _now(), 0.0  # for how long it has not been sure
        self._unwritten: dict[str, str] = {}  # for the board
        self._beats = threading.Thread(target=self._beat, name="ftrun-beat", daemon=True)
        self.write_incarnation(place.incarnation)

    def begin(self) -> None:
        self._beats.start()

    def poke(self) -> None:
        """The agent has told the generations something."""
        self._poked = True
        self._wake.set()

    def write(self, key: str, value: str) -> None:
        """On the board, soon: the store may be slow to answer."""
        self._unwritten[key] = value
        self._wake.set()

    def write_incarnation(self, highest: int) -> None:
        """For whoever takes this node's place. The next one is taken for in use, too: all may die before it is told of."""
        self.write(f"incarnation/{self._node}/{self._place.number}", str(highest + 1))

    def hear(self) -> None:
        """The agent is about to look at all that there is. What comes after this wakes it again, though it may see it already."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def ended(self) -> list[tuple[int, End]]:
        """The nodes that have ended without success since it was last asked, or are back; none once this node has ended."""
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
    def others_have_ended(self) -> bool:
        """As far as it is known: nobody is there who would let anybody in."""
        return all(n in self._ends for n in self._others)

    def is_sure(self) -> bool:
        """That this node's place was this ftrun's a moment ago, or that nobody can take it. If not, there will be news.

        After it was stopped it may not be, and must not start what would be in the way of another one's workers.
        """
        now = _now()
        if now - self._sure_at < SURE:
            self._unsure = 0.0
            return True
        # Whatever the thread still hopes for. But this ftrun may have been stopped in between.
        self._unsure += min(now - self._asked_at, BEAT)
        self._asked_at = now
        self._store_is_gone = self._store_is_gone or self._unsure > GONE
        if self._store_is_gone:
            return True
        self._is_asked = True
        self._wake.set()
        return False

    @property
    def lost_place(self) -> bool:
        """Another ftrun starts this node's workers from now on."""
        return self._lost_place

    def _beat(self) -> None:
        next_beat = 0.0
        while not self._stop and not self._lost_place and not self._store_is_gone:
            try:
                if (now := time.monotonic()) >= next_beat:
                    self._board.beat(self._node)
                    next_beat = now + BEAT
                self._look_and_write()
            except RuntimeError:
                if not self._connect_again():
                    self._lose_store()
            waits = self.generations is not None and self.generations.lacks_members
            self._wake.wait(LOOK if waits else BEAT)
            self._wake.clear()

    def _look_and_write(self) -> None:
        began = _now()
        if self._has_lost_place():
            return
        self._sure_at = began
        if self._is_asked:
            self._is_asked = False
            os.eventfd_write(self.fd, 1)
        while self._unwritten:
            key, value = self._unwritten.popitem()
            try:
                self._board.write(key, value)
            except BaseException:
                self._unwritten.setdefault(key, value)  # the agent may have given a newer one meanwhile
                raise
        self._look()

    def _lose_store(self) -> None:
        self._store_is_gone = True
        os.eventfd_write(self.fd, 1)

    def _connect_again(self) -> bool:
        """A connection may break while the store lives, where this node's place can be taken. False: it does not."""
        while not self._stop and not self._store_is_gone:
            served = is_served(self._board.store)
            if served is False:
                return False
            if served and self._connect():
                return True
            self._wake.wait(BEAT)
            self._wake.clear()
        return False

    def _connect(self) -> bool:
        """All is looked at again: what the broken connection was asked for may not have come."""
        store = own_connection(self._board.store)
        if store is self._board.store:
            return False
        self._board.store = store
        self._seen, self._poked = -1, True
        if self.generations is not None:
            self.generations.write_again()
        return True

    def _has_lost_place(self) -> bool:
        tenant = self._board.tenant(self._node) if self._place.tenant else ""
        if tenant == self._place.tenant:
            return False
        if tenant is None:  # another store, in place of the one that is gone
            self._lose_store()
            return True
        self._lost_place = True
        os.eventfd_write(self.fd, 1)
        return True

    def _look(self) -> None:
        """At what all nodes write, when it is more than it was."""
        news = False
        if self._poked:  # first not any more, then looked at: the agent may poke it again at any moment
            self._poked, news = False, True
        if (there := self._board.news()) != self._seen:
            self._seen, news = there, True
            for other in self._others:
                self._look_at(other)
        if self.generations is None:
            return
        if self.generations.lacks_members:
            for other in [n for n in self._going() if self._is_silent(n)]:
                self._ends[other], news = End.GONE, True
        if news:
            finished = {n for n, end in self._ends.items() if end is End.SUCCEEDED}
            self.generations.look(finished, self._ends.keys() - finished)
            os.eventfd_write(self.fd, 1)

    def _look_at(self, other: int) -> None:
        end = self._end_of(other)
        if end is None or end is self._ends.get(other):
            return
        self._ends[other] = end
        if end is not End.SUCCEEDED:
            self._news.put((other, end))
        os.eventfd_write(self.fd, 1)

    def _end_of(self, other: int) -> End | None:
        """Of its present tenant, which may be another one than at the last look."""
        if (number := self._board.number(other)) > self._numbers[other]:
            self._numbers[other] = number
            self._ends.pop(other, None)
            self._heard.pop(other, None)
            self._news.put((other, End.BACK))
            os.eventfd_write(self.fd, 1)
        return self._board.end_of(other, number)

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
                    while not self._say_and_wait(how, ends, leave) and self._connect():
                        pass
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

    def _say_and_wait(self, how: End, ends: dict[int, End], leave: threading.Event) -> bool:
        """False: the connection broke, and the store lives."""
        try:
            if self._has_lost_place():
                return True
            self._board.write_end(self._place, how)
            self._wait(ends, leave)
            self._board.write(f"knows/{self._node}/{self._place.number}", "")
            if serves_store():
                self._wait_for_knowing(ends, leave)
        except RuntimeError:
            return leave.is_set() or not is_served(self._board.store)
        return True

    def _wait(self, ends: dict[int, End], leave: threading.Event) -> None:
        begun = time.monotonic()
        while not leave.is_set():
            for other in self._others:  # also those that have ended: another ftrun may take their place meanwhile
                ends[other] = self._end_of(other) or (End.GONE if self._is_silent(other) else End.UNKNOWN)
            if End.UNKNOWN not in ends.values():
                return
            _pause(begun, leave)

    def _wait_for_knowing(self, ends: dict[int, End], leave: threading.Event) -> None:
        """Who serves the store goes last: others may have begun to look for who is gone just now."""
        there = [n for n, end in ends.items() if end not in (End.GONE, End.UNKNOWN)]
        since = time.monotonic()
        while not leave.is_set() and time.monotonic() - since < GONE + 2 * BEAT:
            if all(self._board.read(f"knows/{n}/{self._numbers[n]}") is not None for n in there):
                return
            _pause(since, leave)

    def _is_silent(self, other: int) -> bool:
        """Its beats are counted: clocks of other hosts say nothing."""
        silence, began = self._heard.setdefault(other, Silence()), time.monotonic()
        silence.look(began, self._board.beats(other))
        return silence.seconds > GONE


def _now() -> float:
    """Seconds, also those for which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _pause(since: float, leave: threading.Event) -> None:
    """Between two looks, of which a thread that has nothing else to do takes more at first.

    A store has a wait, which keeps others from it for as long, and prints warnings when its time is over.
    """
    leave.wait(min(1.0, 0.02 + (time.monotonic() - since) / 10))
