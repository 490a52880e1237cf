"""ftrun's agent: a worker's failure is the business of that worker's slot alone."""

from __future__ import annotations

import subprocess
from typing import Any

from torch.distributed.elastic.multiprocessing import ProcessFailure

from ftcomm.launch.retries import HELD, TRIES, Begin
from ftcomm.launch.store import somebody_listens
from ftcomm.launch.supervisor import Supervisor
from ftcomm.launch.workers import Exit, Slot, SlotState

MISCONFIGURED = "its job can't be made with these options (its output says why), and another try would end the same way"
TOO_LATE = "the others had finished before it came in"


class FtAgent(Supervisor):
    """Replaces failed workers one by one.

    A slot has ``max_restarts`` replacements; then it is given up and the other workers go on. A job of ftcomm in which no
    worker is left that holds the training state is over: a replacement has nobody to get it from.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By rank, of each slot's last worker that held the training state: what replacements came for.
        self._replaced: dict[int, ProcessFailure] = {}
        self._orphaned: set[tuple[int, int]] = set()  # (rank, incarnation) of replacements that had nobody to join
        self._store_is_gone = False  # the job's, which another node's ftrun had, or a keeper

    def _may_replace(self) -> bool:
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
        elif self._nobody_to_join():
            self._give_up(ended, self._why_nobody(slot))
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
            if self._retries.hold(slot, begin, facts):
                self._not_started(slot, "the rendezvous store does not answer", HELD)
            return
        try:
            begin(slot)
        except (OSError, subprocess.SubprocessError) as error:
            delay = self._retries.add(slot, begin, facts)
            if delay is None:
                self._cannot_start(self._ends[slot.rank], f"no process could be started {TRIES + 1} times ({error})")
                return
            self._not_started(slot, str(error), delay)
        else:
            self._retries.succeeded(slot)
            self._spawned(slot, **facts)

    def _not_started(self, slot: Slot, error: str, again_in: float) -> None:
        self._log("not-started", rank=slot.rank, incarnation=slot.incarnation + 1, error=error, again_in=again_in)

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
        self._give_up(ended, self._why_nobody(ended.slot))

    def _spawned(self, slot: Slot, **more: Any) -> None:
        worker = self._context.worker(slot)
        pid = worker.pid
        self._worker_group.workers[slot.local_rank].id = pid
        if worker.was_standby:
            more["standby"] = True
        if self._nodes is not None:
            self._nodes.write_incarnation(max(one.incarnation for one in self._context.slots.values()))
        self._log("spawn", rank=slot.rank, incarnation=slot.incarnation, pid=pid, **more)

    def _give_up(self, ended: Exit, why: str) -> None:
        assert ended.failure is not None
        rank = ended.slot.rank
        # A replacement that was refused, or that we ended, did not fail: what it came for is the slot's failure.
        failed = (rank, ended.incarnation) not in self._orphaned | self._members.refused
        in_vain = not failed or (self._others_have_finished() and not self._holds_state(ended.slot))
        came_for = self._replaced.get(rank) if in_vain else None
        self._failures[rank] = came_for or ended.failure
        if in_vain and came_for is None and not self._place.is_first:
            self._setting.ended_along[rank] = why
            self._in_vain.add(rank)
        running = self._context.running()
        if self._nobody_to_join():
            running = [slot for slot in running if self._holds_state(slot)]
        self._log("given-up", rank=rank, incarnation=ended.incarnation, why=why, others=len(running))

    # -- when nobody holds the training state any more -------------------------------------------------------------

    def _holds_state(self, slot: Slot) -> bool:
        return slot.incarnation == slot.founder or (slot.rank, slot.incarnation) in self._members.admitted

    def _nobody_to_join(self) -> bool:
        """True when no running worker holds the training state. Known only where all workers are this node's, or other nodes'
        have all ended, or where the store is gone, without which nobody of any node can let one in.

        A script that does not use ftcomm can't join anybody either, but its workers may be independent of each other: they
        are restarted as long as one that was there from the start runs or has succeeded (a single one: always).
        """
        slots = self._context.slots.values()
        if self._worker_group.group_world_size > 1:
            return (self._store_is_gone and self._speaks_ftcomm) or self._others_have_finished()
        if not self._speaks_ftcomm and (len(slots) == 1 or any(slot.state is SlotState.SUCCEEDED for slot in slots)):
            return False
        return not any(self._holds_state(slot) for slot in self._context.running())

    def _others_have_finished(self) -> bool:
        """With nobody left here who holds the state, either. Without ftcomm workers may well be independent of each other."""
        if not self._speaks_ftcomm or self._nodes is None or not self._nodes.others_have_ended:
            return False
        return not any(self._holds_state(slot) for slot in self._context.running())

    def _look_for_store(self) -> None:
        """The job's, not the rendezvous': the first node's ftrun has it or a keeper, whoever has the other."""
        group = self._worker_group
        if self._nodes is not None and group.spec.rdzv_handler.use_agent_store:
            self._store_is_gone = self._store_is_gone or somebody_listens(group.master_addr, group.master_port) is False

    def _why_nobody(self, slot: Slot) -> str:
        if self._store_is_gone:
            return "the job's store, through which it would come in, is gone. Start the job again"
        if self._others_have_finished() and not self._holds_state(slot):
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
            why = TOO_LATE if finished else self._why_nobody(slot)
            self._log("orphaned", rank=slot.rank, incarnation=slot.incarnation, why=why)
            self._context.worker(slot).kill()
