"""torch's elastic agent, changed in one thing: a worker's failure is the business of that worker's slot alone."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
)

from ftcomm.launch.folder import MALFORMED, Event, RunFolder
from ftcomm.launch.members import Members
from ftcomm.launch.narrator import Narrator
from ftcomm.launch.nodes import WHY, Nodes, nobody_listens, serves_store
from ftcomm.launch.pair_log import PairLog
from ftcomm.launch.places import Board, End, Entrance, Place
from ftcomm.launch.retries import TRIES, Begin, Retries
from ftcomm.launch.signals import Signals
from ftcomm.launch.worker import describe_exit, describe_state
from ftcomm.launch.workers import Exit, Slot, SlotState, WorkerContext, start_workers
from ftcomm.rendezvous import as_job_name

KILLS = 3  # of a worker, before ftrun ends without it
MISCONFIGURED = "its job can't be made with these options (its output says why), and another try would end the same way"
TOO_LATE = "the others had finished before it came in"
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


class FtAgent(local_elastic_agent.LocalElasticAgent):  # type: ignore[misc]
    """Replaces failed workers one by one.

    A slot has ``max_restarts`` replacements; then it is given up and the other workers go on. A job of ftcomm in which no
    worker is left that holds the training state is over: a replacement has nobody to get it from.
    """

    def __init__(self, *args: Any, setting: Setting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._setting = setting
        self._failures: dict[int, ProcessFailure] = {}  # of slots that are given up, by rank
        # By rank, of each slot's last worker that held the training state: what replacements came for.
        self._replaced: dict[int, ProcessFailure] = {}
        self._members = Members()
        self._orphaned: set[tuple[int, int]] = set()  # (rank, incarnation) of replacements that had nobody to join
        self._ends: dict[int, Exit] = {}  # of each slot's last worker, by rank
        self._retries = Retries()
        self._speaks_ftcomm = False  # some worker has written an event
        self._nodes: Nodes | None = None  # if there are several
        self._place = Place(0, "")
        self._place_is_lost = False
        self._store_is_gone = False  # the job's, which another node's ftrun had
        self._interrupt: signal.Signals | None = None
        self._interrupted_at = 0.0
        self._kill_at: float | None = None
        self._killed = False
        # --shutdown-timeout, which torch has had since 2.12 or 2.13; before it ended workers within 30 s.
        self._patience = getattr(self, "_shutdown_timeout", 30)

    # -- start ---------------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        spec, setting = worker_group.spec, self._setting
        replays = setting.pair_log is not None
        entrance = Entrance(spec.rdzv_handler, setting.nodes, spec.local_world_size, replays, setting.narrator.say)
        with replaced(spec.rdzv_handler, "next_rendezvous", entrance.enter):
            super()._rendezvous(worker_group)
        self._place = entrance.place

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._name_job(worker_group)
        ranks = [worker.global_rank for worker in worker_group.workers]
        world_size = worker_group.workers[0].world_size
        self._setting.folder.begin(ranks, worker_group.group_rank, worker_group.group_world_size)
        self._setting.narrator.begin(world_size)
        self._setting.signals.collect()  # before there is a worker that could be left alone by an exception
        if worker_group.group_world_size > 1:
            replays = self._setting.pair_log is not None
            self._nodes = Nodes(worker_group.store, self._place, worker_group.group_world_size, replays)
            self._nodes.begin()
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
        secret = os.environ.get("FTCOMM_SECRET") or secrets.token_hex(32)
        if worker_group.group_world_size > 1:
            store = worker_group.store
            if worker_group.group_rank == 0:
                Board(store).write(
                    "nodes", None, str(worker_group.group_world_size)
                )  # before the job's name: see Entrance
                store.set("ftrun/job", job)
                # Who can reach the rendezvous store can read it there; a secret given to all nodes beforehand is not sent.
                store.set("ftrun/secret", "" if os.environ.get("FTCOMM_SECRET") else secret)
            job = store.get("ftrun/job").decode()
            given = os.environ.get("FTCOMM_SECRET")
            sent = store.get("ftrun/secret").decode()
            if bool(given) != (sent == ""):
                raise RuntimeError(
                    "FTCOMM_SECRET is set on some nodes only: set the same one on all of them, or on none."
                )
            secret = given or sent
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
        if self._nodes is not None and not self._place_is_lost:
            self._end_beside_others(self._nodes)
        if self._interrupt is not None:
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
        if ended.failure is not None and self._place_is_lost:
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
        if not self._place_is_lost:
            self._place_is_lost = True
            self._log("place-lost", node=self._place.node)
            self._context.kill_all()
            for slot in self._context.slots.values():
                if slot.state is SlotState.FAILED and slot.rank not in self._failures:  # it was to start again
                    self._ends_with_place(self._ends[slot.rank])

    def _ends_with_place(self, ended: Exit) -> None:
        assert ended.failure is not None
        self._failures[ended.slot.rank] = ended.failure
        self._setting.ended_along[ended.slot.rank] = "another ftrun has taken this node's place"

    def _about(self, ended: Exit) -> dict[str, Any]:
        """What else is to be told of a worker's end."""
        return {}

    @property
    def _ending(self) -> bool:
        """Nobody is replaced any more."""
        return self._interrupt is not None or self._place_is_lost

    def _waits_for_others(self) -> bool:
        """Other nodes', to start workers with theirs."""
        return False

    def _may_replace(self) -> bool:
        """Once it is not so it is never so again."""
        return any(slot.replacements < self._worker_group.spec.max_restarts for slot in self._context.running())

    def _on_failure(self, ended: Exit) -> None:
        assert ended.failure is not None
        slot = ended.slot
        slot.failures += 1
        restarts = self._worker_group.spec.max_restarts
        if (slot.rank, slot.incarnation) in self._members.refused:
            self._give_up(ended, "the policy raise takes no replacements (--policy lossy and replay do)")
        elif self._is_misconfigured(ended):
            self._give_up(ended, MISCONFIGURED)
        elif self._nobody_to_join() or self._others_have_finished():
            self._give_up(ended, self._why_nobody())
        elif slot.replacements >= restarts:
            self._give_up(
                ended, f"it was replaced {restarts} times (--max-restarts)" if restarts else "--max-restarts is 0"
            )
        else:
            if self._holds_state(slot) or slot.rank not in self._replaced:
                self._replaced[slot.rank] = ended.failure
            self._start(slot, self._context.replace)

    def _is_misconfigured(self, ended: Exit) -> bool:
        """It has ended, by itself, because no job could be made."""
        return ended.code > 0 and (ended.slot.rank, ended.incarnation) in self._members.misconfigured

    def _start(self, slot: Slot, begin: Begin, **facts: Any) -> None:
        """The slot's next worker. Where the kernel refuses one it is tried again: the others wait or go on meanwhile."""
        if self._nodes is not None and not self._nodes.is_sure():
            self._retries.hold(slot, begin, facts)
            return
        try:
            begin(slot)
        except (OSError, subprocess.SubprocessError) as error:
            delay = self._retries.add(slot, begin, facts)
            if delay is None:
                self._cannot_start(self._ends[slot.rank], f"no process could be started {TRIES + 1} times ({error})")
                return
            what = {"rank": slot.rank, "incarnation": slot.incarnation + 1}
            self._log("not-started", **what, error=str(error), again_in=delay)
        else:
            self._retries.succeeded(slot)
            self._spawned(slot, **facts)

    def _try_again(self) -> None:
        if self._retries and self._nodes is not None and self._nodes.is_sure():
            self._retries.release()
        for one in self._retries.take_due():
            if self._nobody_to_join():
                self._nobody_waits(self._ends[one.slot.rank])
            else:
                self._start(one.slot, one.begin, **one.facts)

    def _cannot_start(self, ended: Exit, why: str) -> None:
        self._give_up(ended, why)

    def _nobody_waits(self, ended: Exit) -> None:
        """For a worker that could not be started while there was somebody."""
        self._give_up(ended, self._why_nobody())

    def _spawned(self, slot: Slot, **more: Any) -> None:
        worker = self._context.worker(slot)
        pid = worker.pid
        self._worker_group.workers[slot.local_rank].id = pid
        if worker.was_standby:
            more["standby"] = True
        if self._nodes is not None:
            self._nodes.write(
                "incarnation", self._place.node, str(max(s.incarnation for s in self._context.slots.values()))
            )
        self._log("spawn", rank=slot.rank, incarnation=slot.incarnation, pid=pid, **more)

    def _give_up(self, ended: Exit, why: str) -> None:
        assert ended.failure is not None
        rank = ended.slot.rank
        # A replacement that was refused, or that we ended, did not fail: what it came for is the slot's failure.
        failed = (rank, ended.incarnation) not in self._orphaned | self._members.refused
        came_for = None if failed and not self._others_have_finished() else self._replaced.get(rank)
        self._failures[rank] = came_for or ended.failure
        if self._others_have_finished() and not self._place.is_first and came_for is None:
            self._setting.ended_along[rank] = TOO_LATE
        running = self._context.running()
        if self._nobody_to_join():
            running = [slot for slot in running if self._holds_state(slot)]
        self._log("given-up", rank=rank, incarnation=ended.incarnation, why=why, others=len(running))

    # -- when nobody holds the training state any more -------------------------------------------------------------

    def _holds_state(self, slot: Slot) -> bool:
        return slot.incarnation == slot.founder or (slot.rank, slot.incarnation) in self._members.admitted

    def _nobody_to_join(self) -> bool:
        """True when no running worker holds the training state. Known only where all workers are this node's, or other nodes'
        have all succeeded, or where the store is gone, without which nobody of any node can let one in.

        A script that does not use ftcomm can't join anybody either, but its workers may be independent of each other: they
        are restarted as long as one that was there from the start runs or has succeeded (a single one: always).
        """
        slots = self._context.slots.values()
        if self._worker_group.group_world_size > 1:
            return self._speaks_ftcomm and (self._store_is_gone or self._others_have_finished())
        if not self._speaks_ftcomm and (len(slots) == 1 or any(slot.state is SlotState.SUCCEEDED for slot in slots)):
            return False
        return not any(self._holds_state(slot) for slot in self._context.running())

    def _others_have_finished(self) -> bool:
        """With nobody left here who holds the state, either."""
        if self._nodes is None or not self._nodes.others_have_succeeded:
            return False
        return not any(self._holds_state(slot) for slot in self._context.running())

    def _look_for_store(self) -> None:
        """The job's, not the rendezvous': the ftrun with the workers of rank 0 has it, whoever has the other."""
        group = self._worker_group
        if self._nodes is not None and group.group_rank > 0 and group.spec.rdzv_handler.use_agent_store:
            self._store_is_gone = self._store_is_gone or nobody_listens(group.master_addr, group.master_port)

    def _why_nobody(self) -> str:
        if self._store_is_gone:
            return "the store in another node's ftrun, through which it would come in, is gone. Start the job again"
        if self._others_have_finished():
            return TOO_LATE
        return "no worker is left that it could join"

    def _look_for_members(self) -> None:
        """Ends replacements that have nobody to join."""
        if not self._nobody_to_join():
            return
        for slot in self._context.running():
            if self._holds_state(slot) or (slot.rank, slot.incarnation) in self._orphaned:
                continue  # the second: killed already; its end will be seen like any other, and finds nobody to join
            if self._setting.folder.loses_events():
                return  # it may have come in, and told so
            self._orphaned.add((slot.rank, slot.incarnation))
            finished = any(other.state is SlotState.SUCCEEDED for other in self._context.slots.values())
            finished = finished and not self._store_is_gone
            why = TOO_LATE if finished else self._why_nobody()
            self._log("orphaned", rank=slot.rank, incarnation=slot.incarnation, why=why)
            self._context.worker(slot).kill()

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
        if self._failures and all(self._setting.ended_along.get(rank) == TOO_LATE for rank in self._failures):
            ended = self._place.before  # it has changed nothing
        how = End.LEFT if of_sigterm else End.INTERRUPTED if self._interrupt else ended
        if stays:
            self._setting.narrator.say(
                "this node's workers have ended; waiting for the other nodes (Ctrl-C: do not wait)"
            )
        others, got = nodes.end(how, stays, self._setting.signals)
        self._setting.other_nodes.update(others)
        self._interrupt = self._interrupt or got

    def _log(self, name: str, **fields: Any) -> Event:
        event = self._setting.folder.log(name, **fields)
        self._setting.narrator.hear(event)
        return event
