"""A host takes the place of one that is gone: ftrun, started there by the same command, starts that node's workers again.

Each node's place has a *tenant*, the ftrun that runs its workers; the rendezvous store says who. One that comes later takes a
place by compare-and-set if its tenant has said that it ends, without success, or has ended without a word: on this host that is
known, of another one it is taken for so when it has counted up no beat for :data:`SILENT` seconds. It may live after all,
stopped or cut off: when it looks next it sees that it is none any more, kills its workers and ends. Until then both have workers
for the same ranks; who of them are members the job decides by itself, as the later ones have higher incarnations.

Under a static rendezvous the place is that of ``--node-rank``. Under torch's dynamic ones (c10d) who comes when all nodes are
there waits as a spare, and takes the first place that gets free. Never that of the first node, which has the store in which
membership is decided.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from ftcomm.boot import boot_id
from ftcomm.launch.generations import NEWS
from ftcomm.launch.pair_log import start_time

SILENT = 16.0  # seconds without a beat, when three were due
LOOK = 2.0  # seconds between two looks of who waits for a place


class End(Enum):
    """How a node's workers ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # a slot was given up
    INTERRUPTED = "interrupted"  # Ctrl-C, a terminal that was closed
    LEFT = "left"  # SIGTERM: the machine is taken away
    GONE = "gone"  # not said by itself: its ftrun has died
    UNKNOWN = "unknown"  # the store has gone before anything was known
    BACK = "back"  # not any more: another ftrun has taken its place


@dataclass(frozen=True)
class Place:
    """A node's, as its tenant has got it."""

    node: int
    tenant: str  # who that is
    incarnation: int = 0  # of its first workers
    is_first: bool = True  # there was no other tenant before
    before: End = End.GONE  # how the one before has ended
    # Under replay: the generation that the job was in, and the ranks that this does without.
    generation: int = 0
    finished: tuple[int, ...] = ()


class Board:
    """What the store says of places."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, what: str, node: int | None = None) -> str | None:
        key = f"ftrun/{what}" if node is None else f"ftrun/{what}/{node}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def write(self, what: str, node: int | None, value: str) -> None:
        self._store.set(f"ftrun/{what}" if node is None else f"ftrun/{what}/{node}", value)

    def tell(self) -> None:
        """The others are to look."""
        self._store.add(NEWS, 1)

    def beats(self, node: int) -> int:
        return int(self._store.add(f"ftrun/beat/{node}", 0))

    def end_of(self, node: int) -> End | None:
        said = self.read("end", node)
        return None if said is None or End(said) is End.BACK else End(said)

    def found(self, node: int, workers: int) -> Place | None:
        """The place of a node that nobody has had yet."""
        place = Place(node, _name_of_tenant(1))
        if self._store.compare_set(f"ftrun/tenant/{node}", "", place.tenant).decode() != place.tenant:
            return None
        self.write("workers", node, str(workers))
        self.write("incarnation", node, "0")
        return place

    def take(self, node: int, before: str) -> Place | None:
        """The place of a node whose tenant is gone; None: somebody else was faster."""
        tenant = _name_of_tenant(int(before.split()[0]) + 1)
        if self._store.compare_set(f"ftrun/tenant/{node}", before, tenant).decode() != tenant:
            return None
        incarnation = int(self.read("incarnation", node) or "0") + 1
        generation, finished = json.loads(self.read("generation") or "[0, []]")
        ended = self.end_of(node) or End.GONE
        self.write("incarnation", node, str(incarnation))
        self._store.delete_key(f"ftrun/knows/{node}")
        self.write("end", node, End.BACK.value)
        self.tell()
        return Place(node, tenant, incarnation, False, ended, generation, tuple(finished))


class Watch:
    """Of places that may get free."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._first: dict[int, tuple[str, int]] = {}  # each node's tenant and beats
        self._heard: dict[int, tuple[tuple[str, int], float]] = {}  # the last ones, and since when

    def lives(self, board: Board, node: int) -> bool:
        """Whether its tenant has shown itself since this was first asked."""
        seen = _seen(board, node)
        return seen is not None and self._first.setdefault(node, seen) != seen

    def is_free(self, board: Board, node: int) -> str | None:
        """The tenant that it had, if there is none any more. RendezvousClosedError: nobody can take it."""
        if (seen := _seen(board, node)) is None:
            return None
        end, now = board.end_of(node), time.monotonic()
        if end is End.SUCCEEDED:
            raise RendezvousClosedError(f"the workers of node {node} have succeeded")
        if node not in self._heard or self._heard[node][0] != seen:
            self._heard[node] = (seen, now)
        tenant, _ = seen
        if end is None and not _is_dead(tenant) and now - self._heard[node][1] < SILENT:
            return None
        if (had := board.read("workers", node)) != str(self._workers):
            raise RendezvousClosedError(
                f"node {node} had {had} workers, and whoever takes its place has to have as many: --nproc-per-node {had}"
            )
        return tenant


def _seen(board: Board, node: int) -> tuple[str, int] | None:
    """Its tenant and how often that has shown itself."""
    tenant = board.read("tenant", node)
    return None if tenant is None else (tenant, board.beats(node))


class Entrance:
    """In place of a rendezvous handler's own ``next_rendezvous``."""

    def __init__(
        self, handler: RendezvousHandler, nodes: int, workers: int, replays: bool, say: Callable[[str], None]
    ) -> None:
        self._handler, self._nodes, self._workers, self._replays, self._say = handler, nodes, workers, replays, say
        self._meet = handler.next_rendezvous
        self.place = Place(0, "")

    def enter(self) -> RendezvousInfo:
        if self._nodes == 1 or self._handler.get_backend() == "static" or self._store_of_round() is None:
            return self._founded(self._meet())
        return self._meet_or_take()

    def _store_of_round(self) -> Store | None:
        """What those who have met use. Torch's dynamic handler gives it to nobody else."""
        try:
            number = self._handler._state_holder.state.round
            return PrefixStore(f"torch.rendezvous.{self._handler.get_run_id()}.{number}", self._handler._store)
        except AttributeError:
            return None

    def _founded(self, met: RendezvousInfo) -> RendezvousInfo:
        if met.world_size > 1:
            board = Board(met.store)
            self.place = board.found(met.rank, self._workers) or self._take_over(board, met.rank)
        return met

    def _take_over(self, board: Board, node: int) -> Place:
        """It is told whose place it takes."""
        self._say(
            f"node {node} was here before: its place is taken if its ftrun is gone (looking for up to {SILENT:.0f} s)"
        )
        watch = Watch(self._workers)
        while True:
            if (before := watch.is_free(board, node)) is not None and (place := board.take(node, before)) is not None:
                return place
            if watch.lives(board, node):
                raise RendezvousClosedError(f"node {node} is there already, and its ftrun lives: see --node-rank")
            time.sleep(LOOK)

    def _meet_or_take(self) -> RendezvousInfo:
        """Torch lets nobody in who comes later, but has it wait for another round, which never comes."""
        met: queue.SimpleQueue[RendezvousInfo | BaseException] = queue.SimpleQueue()

        def meet() -> None:
            try:
                met.put(self._meet())
            except BaseException as error:  # noqa: BLE001 - for the other thread
                met.put(error)

        threading.Thread(target=meet, name="ftrun-rendezvous", daemon=True).start()
        watch = Watch(self._workers)
        waits = False
        while True:
            with contextlib.suppress(queue.Empty):
                found = met.get(timeout=LOOK)
                if isinstance(found, BaseException):
                    raise found
                return self._founded(found)
            store = self._store_of_round()
            assert store is not None
            board = Board(store)
            with contextlib.suppress(DistError):  # of a store that is gone: the other thread says so
                if board.read("job") is None:
                    continue
                if (place := self._take_any(board, watch)) is not None:
                    self.place = place
                    info = RendezvousStoreInfo.build(place.node, store, None)
                    return RendezvousInfo(store, place.node, int(board.read("nodes") or "0"), info)
                if not waits:
                    waits = True
                    self._say(
                        "the run has all its nodes: this one waits, and takes the place of the first one that is lost "
                        "(Ctrl-C: do not wait)"
                    )

    def _take_any(self, board: Board, watch: Watch) -> Place | None:
        nodes = range(int(board.read("nodes") or "0"))
        ends = [board.end_of(node) for node in nodes]
        over = (End.FAILED, End.INTERRUPTED) if self._replays else ()
        # Of a run that was killed everything is still there, if its store outlives it.
        if not watch.lives(board, 0) or ends[0] is not None or any(end in over for end in ends):
            return None
        for node in nodes[1:]:
            if ends[node] is End.SUCCEEDED:
                continue
            if (before := watch.is_free(board, node)) is not None and (place := board.take(node, before)) is not None:
                return place
        return None


def _name_of_tenant(number: int) -> str:
    pid = os.getpid()
    return f"{number} {secrets.token_hex(8)} {_here()} {pid} {start_time(pid)}"


def _here() -> str:
    """Where a process has one number."""
    return f"{boot_id() or secrets.token_hex(8)}/{os.stat('/proc/self/ns/pid').st_ino}"


def _is_dead(tenant: str) -> bool:
    """For certain: of a process that has had a number here."""
    _, _, where, pid, start = tenant.split()
    return where == _here() and str(start_time(int(pid))) != start
