"""How an ftrun comes into a run of several nodes: it meets the others at the start, takes a place, or waits for one.

Under a static rendezvous a place is that of ``--node-rank``. Under torch's dynamic ones (c10d) who comes when all nodes are there
waits as a spare, and takes the first place that gets free. Never that of the first node, which has the store in which membership
is decided, but where a keeper has it (:mod:`ftcomm.launch.keeper`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from ftcomm.launch.keeper import ask_for_store, close_store, is_kept
from ftcomm.launch.meeting import Meeting
from ftcomm.launch.places import SILENT, End, Place, Places, Watch
from ftcomm.launch.secret import check_secret
from ftcomm.launch.store import is_served, serves_store

LOOK = 2.0  # seconds between two looks of who waits for a place
STAYS = 70.0  # seconds for which a spare that has the store stays behind: longer than a node waits for one that is gone

Enter = Callable[[Store, Place, int], None]  # with the store, the place, and how many nodes there are


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
        self._kept_at: int | None = None  # the port of the run's store, if a keeper has it
        self._refuses_late = False  # of a run of one node, though there might have been more, nobody can be a spare
        self.run_is_over = nodes == 1

    def shutdown(self) -> bool:
        """Torch closes the rendezvous for all, for ever, when one ends; here the run goes on, and spares wait for it."""
        self.end_heartbeats()
        if not self.run_is_over:
            return True
        try:
            if not self._rendezvous_is_kept or self._refuses_late:
                return bool(self._close())
            if self._kept_at is not None:  # the rendezvous stays open for another run of the name
                close_store(self._handler._store, self._handler.get_run_id(), self._kept_at)
        except DistError:
            return False
        return True

    def end_heartbeats(self) -> None:
        """Of torch's timer, whose thread would be in the store when the interpreter ends."""
        if hasattr(self._handler, "_stop_heartbeats"):
            self._handler._stop_heartbeats()

    def next_rendezvous(self) -> RendezvousInfo:
        if self._nodes == 1 or not self._is_dynamic:
            return self._founded(self._meet())
        return self._meet_or_take()

    @property
    def _is_dynamic(self) -> bool:
        return hasattr(self._handler, "_state_holder") and hasattr(self._handler, "_store")

    @property
    def _rendezvous_is_kept(self) -> bool:
        return self._is_dynamic and is_kept(self._handler._store)

    def _round(self) -> int:
        return int(self._handler._state_holder.state.round)

    def _run_before(self, end: int) -> Places | None:
        """What the nodes of the run use, if it has begun in one of the rounds before that. Torch gives it to nobody else, and
        begins another round when it has not heard of those who are left for a while, though they go on.
        """
        for number in reversed(range(end)):
            store = PrefixStore(self._prefix(number), self._handler._store)
            if (board := Places(store)).read("job") is not None:
                return board
        return None

    def _prefix(self, number: int) -> str:
        """Torch's, of all that nodes write in a round."""
        return f"torch.rendezvous.{self._handler.get_run_id()}.{number}"

    def _founded(self, met: RendezvousInfo) -> RendezvousInfo:
        if met.world_size == 1:
            self.run_is_over = True  # when this ftrun ends
            self._refuses_late = self._nodes > 1
        else:
            board = Places(met.store)
            place = board.found(met.rank, self._workers) or self._take_over(board, met.rank)
            if self._is_dynamic:
                met = self._with_store_of_run(met, board)
            self._enter(met.store, place, met.world_size)
        return met

    def _with_store_of_run(self, met: RendezvousInfo, board: Places) -> RendezvousInfo:
        """The first node says whether a keeper has it."""
        if met.rank == 0:
            port: int | str | None = None
            if self._handler.use_agent_store and self._rendezvous_is_kept:
                run = self._handler.get_run_id()
                port = ask_for_store(self._handler._store, run, self._prefix(self._round()), met.world_size)
            board.write("store", json.dumps(port))
        return RendezvousInfo(met.store, met.rank, met.world_size, self._store_of_run(board))

    def _store_of_run(self, run: Places) -> RendezvousStoreInfo:
        """At the keeper's address as this node knows it."""
        port = json.loads(run.wait_for("store"))
        if port is None:
            return RendezvousStoreInfo.build(-1, run.store, None)
        if isinstance(port, str):
            raise RendezvousConnectionError(f"ftcomm store can't open a store for the run: {port}")
        self._kept_at = port
        return RendezvousStoreInfo(self._handler._store.host, port)

    def _take_over(self, board: Places, node: int) -> Place:
        """It is told whose place it takes."""
        self._say(
            f"node {node} was here before: its place is taken if its ftrun is gone (looking for up to {SILENT:.0f} s)"
        )
        watch = Watch(self._workers)
        while True:
            watch.look(board, node)
            before = watch.free(node)
            if before is not None and (place := board.take(node, before, self._workers)) is not None:
                return place
            if watch.lives(node):
                raise RendezvousClosedError(f"node {node} is there already, and its ftrun lives: see --node-rank")
            time.sleep(LOOK)

    def _meet_or_take(self) -> RendezvousInfo:
        """Torch lets nobody in who comes later, but has it wait for another round."""
        meeting = Meeting(self._handler, self._meet)
        watch = Watch(self._workers)
        another: RendezvousInfo | None = None  # a round that is not the run's first
        while True:
            found = meeting.wait(LOOK)
            if isinstance(found, RendezvousInfo):
                another = found
                if self._rendezvous_is_kept:
                    self._handler._shared_tcp_store_server = None  # which torch has begun, and nobody needs
            run = self._run(another is not None)
            over = run is None or self._is_over(run, watch)
            waits_on = isinstance(found, RendezvousTimeoutError) and not over  # a spare, for as long as it takes
            # Whom torch has as the first node of the round may have gone before it has written what the others wait for.
            if waits_on or (isinstance(found, DistError) and is_served(self._handler._store)):
                meeting.begin()
            elif isinstance(found, BaseException):
                self._stay_behind(run)
                raise found
            if another is not None and over and (run is None or self._begins_anew(run, watch)):
                try:
                    return self._founded(another)
                except DistError:  # who should have founded it with this one has gone; or the store, and torch says so
                    another = None
                    meeting.begin()
            if run is not None and not over and (place := self._take_any(run, watch)) is not None:
                meeting.end()
                return self._taken(run, place)

    def _begins_anew(self, run: Places, watch: Watch) -> bool:
        """Nobody goes on with that run. What was silent for long may live after all, and must not beside the next one."""
        with contextlib.suppress(DistError):
            for node in self._look(run, watch):
                watch.close(run, node)
            return all(watch.is_over(node) for node in self._look(run, watch))
        return False

    def _is_over(self, run: Places, watch: Watch) -> bool:
        """Looks at all places. A run that is over may begin again, as after Ctrl-C.

        RendezvousClosedError: this one was to be a spare of it, and it does not.
        """
        with contextlib.suppress(DistError):  # of a store that is gone: the thread in torch's rendezvous says so
            nodes = self._look(run, watch)
            held = nodes if self._outlives_nodes(run) else nodes[:1]  # without the store nobody goes on
            if not all(watch.is_over(node) for node in held):
                return False
            is_done = any(watch.end(node) in (End.SUCCEEDED, End.FAILED) for node in held)
            if not is_done or (self._rendezvous_is_kept and not any(watch.has_lived(node) for node in nodes)):
                return True
            if all(watch.is_over(node) for node in nodes):
                self._stay_behind(run)
                raise RendezvousClosedError("the run has had all its nodes without this one (--nnodes), and is over")
        return False

    @staticmethod
    def _nodes_of(run: Places) -> range:
        return range(int(run.read("nodes") or "0"))

    def _look(self, run: Places, watch: Watch) -> range:
        nodes = self._nodes_of(run)
        for node in nodes:
            watch.look(run, node)
        return nodes

    @staticmethod
    def _outlives_nodes(run: Places) -> bool:
        """Whether its store outlives all its nodes."""
        return json.loads(run.read("store") or "null") is not None

    def _run(self, before_this_round: bool) -> Places | None:
        with contextlib.suppress(DistError):
            return self._run_before(self._round() + (not before_this_round))
        return None

    def _taken(self, run: Places, place: Place) -> RendezvousInfo:
        nodes = len(self._nodes_of(run))
        self._enter(run.store, place, nodes)
        return RendezvousInfo(run.store, place.node, nodes, self._store_of_run(run))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _take_any(self, run: Places, watch: Watch) -> Place | None:
        with contextlib.suppress(DistError):
            return self._find(run, watch)
        return None

    def _find(self, run: Places, watch: Watch) -> Place | None:
        """By what was seen just now."""
        nodes = self._nodes_of(run)
        is_kept = self._outlives_nodes(run)
        over = (End.FAILED, End.INTERRUPTED) if self._replays else ()
        # Of a run that was killed everything is still there, if its store outlives it.
        goes_on = any(watch.is_well(node) for node in (nodes if is_kept else nodes[:1]))
        goes_on = goes_on and not any(watch.end(node) in over for node in nodes)
        if goes_on:
            check_secret(run)
        for node in nodes[not is_kept :] if goes_on else ():
            if watch.end(node) is End.SUCCEEDED:
                continue
            try:
                before = watch.free(node)
                if before is not None and (place := run.take(node, before, self._workers)) is not None:
                    return place
            except RendezvousClosedError as error:
                self._say_once(str(error))
        why = "the rendezvous store is here, and has to stay" if serves_store() else "Ctrl-C: do not wait"
        self._say_once(
            f"the run has all its nodes: this one waits, and takes the place of the first one that is lost ({why})"
        )
        return None

    def _stay_behind(self, run: Places | None) -> None:
        """The store may live here: who else is about to end needs it."""
        until = time.monotonic() + STAYS
        with contextlib.suppress(DistError):
            while run is not None and serves_store() and time.monotonic() < until:
                if all(run.read(f"knows/{node}/{run.number(node)}") is not None for node in self._nodes_of(run)):
                    return
                time.sleep(0.2)
