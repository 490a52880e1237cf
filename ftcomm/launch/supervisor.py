"""torch's elastic agent, with a loop of its own: it waits for ends of workers, signals, events and news of other nodes."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
)

from ftcomm.launch.board import Board
from ftcomm.launch.entrance import Entrance
from ftcomm.launch.folder import MALFORMED, Event, RunFolder
from ftcomm.launch.members import Members
from ftcomm.launch.narrator import Narrator
from ftcomm.launch.nodes import WHY, Nodes
from ftcomm.launch.pair_log import PairLog
from ftcomm.launch.places import End, Place
from ftcomm.launch.retries import Retries
from ftcomm.launch.secret import check_secret, make_secret, write_secret
from ftcomm.launch.signals import Signals
from ftcomm.launch.store import serves_store
from ftcomm.launch.worker import describe_exit, describe_state
from ftcomm.launch.workers import Exit, SlotState, WorkerContext, start_workers
from ftcomm.rendezvous import as_job_name

KILLS = 3  # of a worker, before ftrun ends without it
LOOK = 86400.0  # seconds, for which it waits at most at a time: the kernel takes milliseconds in 31 bits
ONCE = 0.3  # seconds, in which the same news may come twice: whoever signals all processes of a job may pass a signal on, too


@dataclass
class Setting:
    """What ftrun gives its agent besides torch's own arguments."""

    folder: RunFolder
    narrator: Narrator
    signals: Signals
    pair_log: PairLog | None = None  # under the policy replay
    standbys: int = 0
    nodes: int = 1  # at most
    interpreter_flags: int = 1  # of a worker's arguments, how many come before the script
    place_is_lost: bool = False  # to another ftrun
    ended_along: dict[int, str] = field(default_factory=dict)  # ranks that have not failed, and why they were ended
    other_nodes: dict[int, End] = field(default_factory=dict)  # how their workers ended, when the agent has


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """torch's launcher takes its parts from module globals and has no other seam for them."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class Supervisor(local_elastic_agent.LocalElasticAgent):  # type: ignore[misc]
    """Starts the workers, hears of all that happens, and ends. What a failure leads to is its subclasses' business."""

    def __init__(self, *args: Any, setting: Setting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._setting = setting
        self._failures: dict[int, ProcessFailure] = {}  # of slots that are given up, by rank
        self._members = Members()
        self._ends: dict[int, Exit] = {}  # of each slot's last worker, by rank
        self._retries = Retries()
        self._speaks_ftcomm = False  # some worker has written an event
        self._nodes: Nodes | None = None  # if there are several
        self._place = Place(0, "")
        spec = self._worker_group.spec
        replays = setting.pair_log is not None
        self._entrance = Entrance(
            spec.rdzv_handler, setting.nodes, spec.local_world_size, replays, setting.narrator.say, self._enter
        )
        spec.rdzv_handler.shutdown = self._entrance.shutdown
        self._in_vain: set[int] = set()  # ranks of a place that was taken, of which nobody here ever was in
        self._interrupt: signal.Signals | None = None
        self._interrupted_at = 0.0
        self._kill_at: float | None = None
        self._killed = False
        # --shutdown-timeout, which torch has had since 2.12 or 2.13; before it ended workers within 30 s.
        self._patience = getattr(self, "_shutdown_timeout", 30)

    # -- what subclasses decide ------------------------------------------------------------------------------------

    def _on_failure(self, ended: Exit) -> None:
        raise NotImplementedError

    def _try_again(self) -> None:
        """Those of the retries that are due."""
        raise NotImplementedError

    def _look_for_members(self) -> None:
        """Ends workers that have nobody to join."""
        raise NotImplementedError

    def _look_for_store(self) -> None:
        """Whether the job's is gone: something says so."""
        raise NotImplementedError

    def _may_replace(self) -> bool:
        """Once it is not so it is never so again."""
        raise NotImplementedError

    def _waits_for_others(self) -> bool:
        """Other nodes', to start workers with theirs."""
        return False

    def _about(self, ended: Exit) -> dict[str, Any]:
        """What else is to be told of a worker's end."""
        return {}

    # -- start ---------------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with replaced(worker_group.spec.rdzv_handler, "next_rendezvous", self._entrance.next_rendezvous):
            super()._rendezvous(worker_group)

    def _enter(self, store: Store, place: Place, nodes: int) -> None:
        self._place = place
        self._nodes = Nodes(store, place, nodes, self._setting.pair_log is not None)
        self._nodes.begin()  # before it waits for those who are late: others watch whether it lives

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._name_job(worker_group)
        ranks = [worker.global_rank for worker in worker_group.workers]
        world_size = worker_group.workers[0].world_size
        self._setting.folder.begin(ranks, worker_group.group_rank, worker_group.group_world_size)
        self._setting.narrator.begin(world_size)
        self._setting.signals.collect()  # before there is a worker that could be left alone by an exception
        if self._nodes is not None and self._nodes.lost_place:
            raise RendezvousClosedError(f"another ftrun has taken the place of node {self._place.node}")
        start = functools.partial(start_workers, first=self._place.incarnation, founders=self._place.is_first)
        with replaced(local_elastic_agent, "start_processes", start):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        self._log("job", world_size=world_size, ranks=ranks, policy=os.environ.get("FTCOMM_POLICY") or None)
        if not self._place.is_first:
            self._log("place-taken", node=self._place.node)
        for slot in self._context.slots.values():
            self._log("spawn", rank=slot.rank, incarnation=slot.incarnation, pid=pids[slot.local_rank])
        self._context.keep_standbys(self._setting.standbys, self._setting.interpreter_flags)
        return pids

    def _name_job(self, worker_group: WorkerGroup) -> None:
        """Job name and secret: new for each run, the same on all nodes."""
        run_id = str(worker_group.spec.rdzv_handler.get_run_id())
        job = f"{as_job_name(run_id)}-{secrets.token_hex(4)}"
        if worker_group.group_world_size > 1:
            board = Board(worker_group.store)
            if worker_group.group_rank == 0 and self._place.is_first:
                board.write("nodes", str(worker_group.group_world_size))
                write_secret(board)
                board.write("job", job)  # last: it says that there is a run, to spares, too
            job = board.wait_for("job")
            secret = check_secret(board)
        else:
            secret = make_secret()
        os.environ["FTCOMM_JOB"] = job
        os.environ["FTCOMM_SECRET"] = secret
        os.environ["FTCOMM_EVENTS"] = str(self._setting.folder.path)

    @property
    def _context(self) -> WorkerContext:
        assert isinstance(self._pcontext, WorkerContext)
        return self._pcontext

    # -- the run -------------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Takes the place of torch's loop, which looks every monitor interval and restarts all workers of the group."""
        try:
            self._initialize_workers(self._worker_group)
        except RendezvousGracefulExitError as error:  # of which torch's run() would make None
            raise RendezvousClosedError(
                "the run has had all its nodes without this one (--nnodes), and is over"
            ) from error
        except DistError as error:  # of the store: its port is taken, or nobody has it
            raise RendezvousConnectionError(str(error).partition("\n")[0]) from error
        self._supervise()
        self._worker_group.state = WorkerState.FAILED if self._failures else WorkerState.SUCCEEDED
        if self._nodes is not None and not self._setting.place_is_lost:
            self._end_beside_others(self._nodes)
        if self._interrupt is not None:
            self._entrance.end_heartbeats()
            raise SignalException(f"ftrun got {self._interrupt.name}", sigval=self._interrupt)
        ranks = [slot.rank for slot in self._context.slots.values()]
        return RunResult(
            state=self._worker_group.state, failures=dict(self._failures), return_values=dict.fromkeys(ranks)
        )

    def _supervise(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._setting.signals.fd, selectors.EVENT_READ)
            selector.register(self._setting.folder.fd, selectors.EVENT_READ)
            selector.register(self._context.standbys.fd, selectors.EVENT_READ)
            if self._nodes is not None:
                selector.register(self._nodes.fd, selectors.EVENT_READ)
            rendezvous_is_gone = False
            while True:
                if self._nodes is not None:
                    self._nodes.hear()  # first: later, it would take away the news of what was looked at before that
                for sig in self._setting.signals.take():
                    self._on_signal(sig)
                self._read_events()
                ended = self._context.ended()
                if ended:
                    self._read_events()  # what a worker wrote before its end comes before the news of its end
                for one in ended:
                    self._on_exit(one)
                if self._nodes is not None and self._nodes.store_is_gone and not rendezvous_is_gone:
                    rendezvous_is_gone = True
                    self._look_for_store()  # which may be the same
                if self._nodes is not None and self._nodes.lost_place:
                    self._lose_place()
                if self._ending:
                    self._retries.clear()
                else:
                    self._try_again()
                    self._look_for_members()
                if self._nodes is not None:
                    self._hear_of_others(self._nodes)
                if not self._context.running() and not self._retries and not self._waits_for_others():
                    break
                # After the workers that had to be started: no standby must keep one of them waiting.
                self._context.standbys.tend(self._log, last=self._ending or not self._may_replace())
                selector.select(self._time_left())
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    self._kill("did not end in time")
                self._kill_again()
        self._context.standbys.end()
        self._read_events()

    def _read_events(self) -> None:
        for event in self._setting.folder.new_events():
            self._speaks_ftcomm = True
            self._setting.narrator.hear(event)
            with contextlib.suppress(*MALFORMED):
                if self._members.hear(event):
                    self._on_event(event)

    def _on_event(self, event: Event) -> None:
        """A worker's event, for more than being told."""
        if event["event"] == "authority-lost":
            self._look_for_store()

    def _on_exit(self, ended: Exit) -> None:
        slot = ended.slot
        self._ends[slot.rank] = ended
        how = describe_exit(ended.code)
        facts = {"rank": slot.rank, "incarnation": ended.incarnation, "pid": ended.pid, "code": ended.code, "how": how}
        self._log("exit", **facts, **self._about(ended))
        if ended.failure is not None and self._setting.place_is_lost:
            self._ends_with_place(ended)
        elif ended.failure is not None:
            self._look_for_store()
        if ended.failure is not None and not self._ending:
            self._on_failure(ended)

    def _hear_of_others(self, nodes: Nodes) -> None:
        """Nobody starts their ranks again, but the others go on, or wait by their own patience."""
        for node, how in nodes.ended():
            self._tell_of_node(node, how)

    def _tell_of_node(self, node: int, how: End) -> None:
        if how is End.BACK:
            self._log("node-back", node=node)
        elif not self._ending and self._context.running():
            self._log("node-ended", node=node, why=WHY[how].format(node))

    def _lose_place(self) -> None:
        """This ftrun was taken for dead, as one that is stopped may be. Others are in its workers' place, or soon will be."""
        if not self._setting.place_is_lost:
            self._setting.place_is_lost = True
            self._log("place-lost", node=self._place.node)
            self._context.kill_all()
            for slot in self._context.slots.values():
                if slot.state is SlotState.FAILED and slot.rank not in self._failures:  # it was to start again
                    self._ends_with_place(self._ends.get(slot.rank))

    def _ends_with_place(self, ended: Exit | None) -> None:
        if ended is not None and ended.failure is not None:  # else it does not die
            self._failures[ended.slot.rank] = ended.failure
            self._setting.ended_along[ended.slot.rank] = "another ftrun has taken this node's place"

    @property
    def _ending(self) -> bool:
        """Nobody is replaced any more."""
        return self._interrupt is not None or self._setting.place_is_lost

    # -- signals -------------------------------------------------------------------------------------------------

    def _on_signal(self, sig: signal.Signals) -> None:
        if self._interrupt is not None:
            if time.monotonic() - self._interrupted_at > ONCE:
                self._kill(f"got {sig.name} again")
            return
        ending, self._interrupt, self._interrupted_at = self._ending, sig, time.monotonic()
        if ending:
            self._kill(f"got {sig.name}")
            return
        self._kill_at = time.monotonic() + self._patience
        if sig == signal.SIGTERM:
            self._setting.folder.preempted()
        self._context.signal_all(sig)
        self._log("interrupted", signal=sig.name, patience=self._patience)

    def _kill(self, why: str) -> None:
        self._kill_at = None
        if not self._killed:
            self._killed = True
            self._log("killing", why=why, ranks=[slot.rank for slot in self._context.running()])
        self._context.kill_all()

    def _kill_again(self) -> None:
        """No kill is the last word: who is still there after a while is killed again, and in the end ftrun goes without it."""
        for slot in self._context.running():
            worker = self._context.worker(slot)
            again_at = worker.again_at()
            if again_at is None or time.monotonic() < again_at or worker.has_ended():
                continue
            if not worker.kills:
                self._log("killing", why="did not end by itself", ranks=[slot.rank])
                worker.kill()
                continue
            facts = {"rank": slot.rank, "pid": worker.pid, "kills": worker.kills, "state": describe_state(worker.pid)}
            if self._killed and worker.kills >= KILLS:
                self._log("abandoned", **facts)
                slot.state = SlotState.FAILED
            else:
                self._log("kill-again", **facts)
                worker.kill_again()

    def _time_left(self) -> float | None:
        times = [self._context.worker(slot).again_at() for slot in self._context.running()]
        due = [at for at in (self._kill_at, self._retries.next_at(), *times) if at is not None]
        return min(max(0.0, min(due) - time.monotonic()), LOOK) if due else None

    # -- end -----------------------------------------------------------------------------------------------------

    def _end_beside_others(self, nodes: Nodes) -> None:
        """Says how this node's workers ended, and stays until the others' have: a store may live here that they need.

        Not when this ftrun is to end: but of SIGTERM, which takes time, where the store does live here.
        """
        of_sigterm = self._interrupt is signal.SIGTERM
        stays = self._interrupt is None or (of_sigterm and serves_store())
        ended = End.FAILED if self._failures else End.SUCCEEDED
        if self._failures and self._in_vain.issuperset(self._failures):
            ended = self._place.before  # it has changed nothing
        how = End.LEFT if of_sigterm else End.INTERRUPTED if self._interrupt else ended
        if stays:
            self._setting.narrator.say(
                "this node's workers have ended; waiting for the other nodes (Ctrl-C: do not wait)"
            )
        others, got = nodes.end(how, stays, self._setting.signals)
        if nodes.lost_place:
            self._setting.place_is_lost = True
            return
        self._entrance.run_is_over = got is None and self._interrupt is None and End.UNKNOWN not in others.values()
        self._setting.other_nodes.update(others)
        self._interrupt = self._interrupt or got

    def _log(self, name: str, **fields: Any) -> Event:
        event = self._setting.folder.log(name, **fields)
        self._setting.narrator.hear(event)
        return event
