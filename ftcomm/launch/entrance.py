"""How an ftrun comes into a run of several nodes: it meets the others at the start, takes a place, or waits for one.

Under a static rendezvous a place is that of ``--node-rank``. Under torch's dynamic ones (c10d) who comes when all nodes are there
waits as a spare, and takes the first place that gets free. Never that of the first node, which has the store in which membership
is decided.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from ftcomm.launch.places import SILENT, Board, End, Place, Watch
from ftcomm.launch.store import serves_store

LOOK = 2.0  # seconds between two looks of who waits for a place
STAYS = 70.0  # seconds for which a spare that has the store stays behind: longer than a node waits for one that is gone

Enter = Callable[[Store, Place, int], None]  # with the store, the place, and how many nodes there are


class _PlaceTaken(Exception):
    """Ends the thread that waits in torch's rendezvous."""


class Entrance:
    """In place of a rendezvous handler's own ``next_rendezvous`` and ``shutdown``."""

    def __init__(
        self,
        handler: RendezvousHandler,
        nodes: int,
        workers: int,
        replays: bool,
        say: Callable[[str], None],
        enter: Enter,
    ) -> None:
        self._handler, self._nodes, self._workers, self._replays = handler, nodes, workers, replays
        self._say, self._enter = say, enter
        self._meet, self._close = handler.next_rendezvous, handler.shutdown
        self._said: set[str] = set()
        self.run_is_over = nodes == 1

    def shutdown(self) -> bool:
        """Torch closes the rendezvous for all, for ever, when one ends; here the run goes on, and spares wait for it."""
        self.end_heartbeats()
        return bool(self._close()) if self.run_is_over else True

    def end_heartbeats(self) -> None:
        """Of torch's timer, whose thread would be in the store when the interpreter ends."""
        if hasattr(self._handler, "_stop_heartbeats"):
            self._handler._stop_heartbeats()

    def next_rendezvous(self) -> RendezvousInfo:
        is_dynamic = hasattr(self._handler, "_state_holder") and hasattr(self._handler, "_store")
        if self._nodes == 1 or not is_dynamic:
            return self._founded(self._meet())
        return self._meet_or_take()

    def _round(self) -> int:
        return int(self._handler._state_holder.state.round)

    def _run_before(self, end: int) -> Board | None:
        """What the nodes of the run use, if it has begun in one of the rounds before that. Torch gives it to nobody else, and
        begins another round when it has not heard of those who are left for a while, though they go on.
        """
        for number in reversed(range(end)):
            store = PrefixStore(f"torch.rendezvous.{self._handler.get_run_id()}.{number}", self._handler._store)
            if (board := Board(store)).read("job") is not None:
                return board
        return None

    def _founded(self, met: RendezvousInfo) -> RendezvousInfo:
        if met.world_size == 1:
            self.run_is_over = True  # when this ftrun ends
        else:
            board = Board(met.store)
            place = board.found(met.rank, self._workers) or self._take_over(board, met.rank)
            self._enter(met.store, place, met.world_size)
        return met

    def _take_over(self, board: Board, node: int) -> Place:
        """It is told whose place it takes."""
        self._say(
            f"node {node} was here before: its place is taken if its ftrun is gone (looking for up to {SILENT:.0f} s)"
        )
        watch = Watch(self._workers)
        while True:
            before = watch.is_free(board, node)
            if before is not None and (place := board.take(node, before, self._workers)) is not None:
                return place
            if watch.lives(board, node):
                raise RendezvousClosedError(f"node {node} is there already, and its ftrun lives: see --node-rank")
            time.sleep(LOOK)

    def _meet_or_take(self) -> RendezvousInfo:
        """Torch lets nobody in who comes later, but has it wait for another round."""
        met: queue.SimpleQueue[RendezvousInfo | BaseException] = queue.SimpleQueue()
        meeting = self._begin_meeting(met)
        watch = Watch(self._workers)
        another: RendezvousInfo | None = None  # a round that is not the run's first
        while True:
            found = _take_from(met, LOOK)
            run = self._run(another is not None)
            if isinstance(found, RendezvousInfo):
                another, run = found, self._run(True)
            elif isinstance(found, RendezvousTimeoutError) and run is not None:
                meeting = self._begin_meeting(met)  # a spare waits for as long as it takes
            elif found is not None:
                self._stay_behind(run)
                raise found
            if another is not None and (run is None or self._is_over(run, watch)):
                return self._founded(another)
            if run is not None and (place := self._take_any(run, watch)) is not None:
                return self._taken(run, place, meeting)

    def _is_over(self, run: Board, watch: Watch) -> bool:
        """And may begin again, as after Ctrl-C. RendezvousClosedError: it has succeeded."""
        end = run.end_of(0, run.number(0))
        if end is End.SUCCEEDED:
            self._stay_behind(run)
            raise RendezvousClosedError("the run has had all its nodes without this one (--nnodes), and is over")
        return end is not None or watch.is_silent(run, 0)

    def _run(self, before_this_round: bool) -> Board | None:
        with contextlib.suppress(DistError):
            return self._run_before(self._round() + (not before_this_round))
        return None

    def _taken(self, run: Board, place: Place, meeting: threading.Thread) -> RendezvousInfo:
        self._end_meeting(meeting)
        nodes = int(run.read("nodes") or "0")
        self._enter(run.store, place, nodes)
        return RendezvousInfo(run.store, place.node, nodes, RendezvousStoreInfo.build(place.node, run.store, None))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _begin_meeting(self, met: queue.SimpleQueue[RendezvousInfo | BaseException]) -> threading.Thread:
        def meet() -> None:
            try:
                met.put(self._meet())
            except _PlaceTaken:
                return
            except BaseException as error:  # noqa: BLE001 - for the other thread
                met.put(error)

        thread = threading.Thread(target=meet, name="ftrun-rendezvous", daemon=True)
        thread.start()
        return thread

    def _end_meeting(self, meeting: threading.Thread) -> None:
        """Else it went on, and would be a node of another round, should there be one."""

        def sync() -> bool | None:
            raise _PlaceTaken

        holder = self._handler._state_holder
        before, holder.sync = holder.sync, sync
        meeting.join(5.0)
        holder.sync = before

    def _take_any(self, board: Board, watch: Watch) -> Place | None:
        with contextlib.suppress(DistError):  # of a store that is gone: the other thread says so
            return self._find(board, watch)
        return None

    def _find(self, board: Board, watch: Watch) -> Place | None:
        nodes = range(int(board.read("nodes") or "0"))
        ends = [board.end_of(node, board.number(node)) for node in nodes]
        over = (End.FAILED, End.INTERRUPTED) if self._replays else ()
        # Of a run that was killed everything is still there, if its store outlives it.
        goes_on = watch.lives(board, 0) and ends[0] is None and not any(end in over for end in ends)
        for node in nodes[1:] if goes_on else ():
            if ends[node] is End.SUCCEEDED:
                continue
            try:
                before = watch.is_free(board, node)
                if before is not None and (place := board.take(node, before, self._workers)) is not None:
                    return place
            except RendezvousClosedError as error:
                self._say_once(str(error))
        why = "the rendezvous store is here, and has to stay" if serves_store() else "Ctrl-C: do not wait"
        self._say_once(
            f"the run has all its nodes: this one waits, and takes the place of the first one that is lost ({why})"
        )
        return None

    def _stay_behind(self, run: Board | None) -> None:
        """The store may live here: who else is about to end needs it."""
        until = time.monotonic() + STAYS
        with contextlib.suppress(DistError):
            while run is not None and serves_store() and time.monotonic() < until:
                nodes = range(int(run.read("nodes") or "0"))
                if all(run.read(f"knows/{node}/{run.number(node)}") is not None for node in nodes):
                    return
                time.sleep(0.2)


def _take_from(
    met: queue.SimpleQueue[RendezvousInfo | BaseException], seconds: float
) -> RendezvousInfo | BaseException | None:
    try:
        return met.get(timeout=seconds)
    except queue.Empty:
        return None
