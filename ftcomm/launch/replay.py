"""ftrun's agent under the policy replay: the others wait for a slot's replacement, so every slot has to come back.

A *generation* is the workers that once met at a start (its founders) and the replacements that they have admitted. When none of
them runs any more, all slots that have not succeeded start anew, out of their logs, as the founders of the next generation.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import ProcessFailure

from ftcomm.boot import boot_id
from ftcomm.exit_code import STARTS_AGAIN
from ftcomm.launch.agent import MISCONFIGURED, TOO_LATE, FtAgent
from ftcomm.launch.folder import Event
from ftcomm.launch.generations import Has
from ftcomm.launch.goodbyes import Goodbyes
from ftcomm.launch.nodes import FAILURES, WHY, Nodes
from ftcomm.launch.places import End
from ftcomm.launch.workers import Exit, Slot, SlotState

ENDS_BY_ITSELF = ("left", "gave-up")  # the second says in its output why
SUSPICIONS = ("heartbeat", "reset")  # may be wrong: the process may well live


class ReplayAgent(FtAgent):
    """Gives up a slot only for its own failures (``max_restarts``), and then ends the job."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._generation = 0
        self._finished: list[int] = []  # ranks that the present generation does without
        self._goodbyes = Goodbyes()
        self._ended_early: set[int] = set()  # ranks whose last worker had come to its end, but had not left
        self._voted_out: set[tuple[Any, Any]] = set()  # (rank, incarnation)
        self._groups: dict[int, list[int]] = {}  # of each rank: the ranks of its log group
        # Of each rank's worker: how often its log group had started again. Incarnations are no measure, as a worker may have
        # died before anybody told of the group.
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._with_group: set[tuple[int, int]] = set()  # (rank, incarnation) that end because one of their group failed
        self._stopping = False  # this generation is over on this node; other nodes may not know yet
        self._removed: list[Event] = []  # that have not been acted on
        self._hopeless = False  # a slot is given up: the others can't go on

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._generation, self._finished = self._place.generation, list(self._place.finished)
        self._announce()
        return super()._start_workers(worker_group)

    def _name_job(self, worker_group: WorkerGroup) -> None:
        super()._name_job(worker_group)
        log = self._setting.pair_log
        assert log is not None
        log.claim(os.environ["FTCOMM_JOB"])
        os.environ["FTCOMM_LOG_DIR"] = str(log.path)
        os.environ["FTCOMM_LOG_OWNER"] = "launcher"
        if worker_group.group_world_size > 1 and not os.environ.get("FTCOMM_HOST"):
            # Ranks of one host have one log. Another ftrun on this host, or in another container of it, has its own.
            os.environ["FTCOMM_HOST"] = f"{os.uname().nodename}/{boot_id()}/{log.path}"
        if os.environ.get("PYTHONHASHSEED", "random") == "random":
            os.environ["PYTHONHASHSEED"] = "0"  # else a set of strings has another order in each process of a slot

    def _announce(self) -> None:
        """For the workers that start from now on."""
        os.environ["FTCOMM_GENERATION"] = str(self._generation)
        os.environ["FTCOMM_FINISHED"] = ",".join(map(str, self._finished))

    # -- one worker ------------------------------------------------------------------------------------------------

    def _read_events(self) -> None:
        super()._read_events()
        while self._removed:
            removed, self._removed = self._removed, []
            super()._read_events()  # what those had said before that, in files that were read before theirs came
            for event in removed:
                self._on_removed(event)

    def _on_event(self, event: Event) -> None:
        super()._on_event(event)
        self._goodbyes.hear(event)
        if event["event"] == "ending":
            self._let_end(event)
        if event["event"] == "started" and event.get("log_group"):
            self._groups[event["rank"]] = event["log_group"]
        if event["event"] == "stale" and event.get("evidence") == "group":
            self._with_group.add((event["rank"], event["incarnation"]))
        if event["event"] == "removed" and event.get("evidence") not in ENDS_BY_ITSELF:
            self._removed.append(event)

    def _on_removed(self, event: Event) -> None:
        """A worker that the others have voted out, stopped or hung, is in its replacement's way."""
        if self._ending:
            return
        who = (event.get("slot"), event.get("slot_incarnation"))
        for slot in self._context.running():
            worker = self._context.worker(slot)
            if who != (slot.rank, slot.incarnation) or event.get("rank") == slot.rank or worker.has_ended():
                continue
            if event.get("evidence") == "group":
                self._with_group.add((slot.rank, slot.incarnation))
            told = who in self._voted_out or worker.ends_by_itself
            if event.get("evidence") in SUSPICIONS and not told:  # else it is ending anyway
                self._voted_out.add(who)
                self._log("voted-out", rank=slot.rank, incarnation=slot.incarnation, pid=worker.pid)
            self._kill_one(slot)

    def _let_end(self, event: Event) -> None:
        """A worker that has failed: it closes its job, and then has so long for the rest of its exit."""
        for slot in self._context.running():
            if (event.get("rank"), event.get("incarnation")) == (slot.rank, slot.incarnation):
                self._context.worker(slot).let_end(time.monotonic() + self._patience)

    def _kill_one(self, slot: Slot) -> None:
        worker = self._context.worker(slot)
        if not worker.ends_by_itself:
            worker.kill()

    def _about(self, ended: Exit) -> dict[str, Any]:
        """Whether somebody waits for the slot's next worker."""
        if ended.failure is None or self._ending:
            return {}
        if self._ends_with_group(ended):
            return {"with_group": self._group_of(ended.slot)}
        if self._is_ours(ended):
            return {}
        return {"waiting": [slot.rank for slot in self._context.running() if self._holds_state(slot)]}

    def _group_of(self, slot: Slot) -> list[int]:
        """By what it said at its start, or another one of the group."""
        return next((group for group in self._groups.values() if slot.rank in group), [])

    def _ends_with_group(self, ended: Exit) -> bool:
        """It was told to, by the others or by this agent: no failure of its own."""
        slot = ended.slot
        by_itself = ended.code == STARTS_AGAIN and bool(self._group_of(slot))
        return by_itself or (slot.rank, ended.incarnation) in self._with_group

    def _is_ours(self, ended: Exit) -> bool:
        """It was killed for the next generation's sake: that is no failure of its slot."""
        return (ended.slot.rank, ended.incarnation) in self._orphaned

    def _on_failure(self, ended: Exit) -> None:
        slot = ended.slot
        if self._is_ours(ended):
            return
        assert ended.failure is not None
        self._replaced[slot.rank] = ended.failure
        if not self._ends_with_group(ended):
            if self._is_misconfigured(ended):
                self._end_job(ended, MISCONFIGURED)
                return
            if self._start_has_failed(ended):
                return  # so has everybody's: it starts with the next generation
            slot.failures += 1
            restarts = self._worker_group.spec.max_restarts
            if slot.failures > restarts:
                failed = f"it failed {restarts + 1} times (--max-restarts {restarts})"
                self._end_job(ended, failed if restarts else "--max-restarts is 0")
                return
            self._take_group_along(slot)
        self._start_again(slot)

    def _start_has_failed(self, ended: Exit) -> bool:
        """Another one's failure, of a start in which nobody can become a member."""
        return ended.code > 0 and (ended.slot.rank, ended.incarnation) in self._members.start_failed

    def _on_exit(self, ended: Exit) -> None:
        if not self._is_ours(ended):
            self._ended_early.discard(ended.slot.rank)
        super()._on_exit(ended)
        slot = ended.slot
        if ended.failure is None and self._nodes is not None:
            done = [one.rank for one in self._context.slots.values() if one.state is SlotState.SUCCEEDED]
            self._nodes.write(
                f"finished/{self._place.node}", ", ".join(map(str, done))
            )  # nobody takes the place any more
        if ended.failure is not None and self._hopeless and not self._failures:
            # For another node's sake. A replacement that was not let in has not failed: what it came for did.
            came_for = None if self._holds_state(slot) else self._replaced.get(slot.rank)
            self._failures[slot.rank] = came_for or ended.failure
            if came_for is None:
                self._setting.ended_along[slot.rank] = "nobody could go on without the other node"
        if slot.incarnation != ended.incarnation or self._ending:
            return  # another one of its group, which ended at the same time, has taken it along
        if ended.failure is None and (slot.rank, ended.incarnation) in self._with_group:
            slot.state = SlotState.FAILED  # it came to its end, but its group has to do it again
            self._start_again(slot)

    def _start_again(self, slot: Slot) -> None:
        if not self._nobody_to_join() and slot.rank not in self._finished:
            self._next_round(slot)
            self._start(slot, self._context.replace)

    def _cannot_start(self, ended: Exit, why: str) -> None:
        self._end_job(ended, why)

    def _nobody_waits(self, ended: Exit) -> None:
        """It starts with the next generation."""

    def _next_round(self, slot: Slot) -> None:
        """Of the worker that is about to start: the one that its group is in, or a new one if its last worker was in that."""
        if group := self._group_of(slot):
            self._rounds[slot.rank] = max(self._rounds[slot.rank] + 1, *(self._rounds[rank] for rank in group))

    def _take_group_along(self, failed: Slot) -> None:
        """What the others of its log group have said to it is in no log: they start again, those that had ended as well.

        One of them may have heard of the failure, ended and been started again before this agent has reaped the failed worker:
        its new worker has said nothing to that one, and stays.
        """
        for slot in self._context.slots.values():
            who = (slot.rank, slot.incarnation)
            if slot is failed or slot.rank not in self._group_of(failed) or who in self._with_group:
                continue
            if self._rounds[slot.rank] > self._rounds[failed.rank]:
                continue
            if slot.state is SlotState.RUNNING:
                self._with_group.add(who)
                self._kill_one(slot)
            elif slot.state is SlotState.SUCCEEDED:
                self._with_group.add(who)
                slot.state = SlotState.FAILED
                self._start_again(slot)

    # -- an end without a goodbye ----------------------------------------------------------------------------------

    def _look_for_early_ends(self) -> None:
        """Who has ended with 0, but is dead to the others, is started again like one that has failed: they wait for it."""
        if self._worker_group.group_world_size > 1:
            return  # they may all have finished, on their nodes, and then nobody would let it in
        for slot in self._context.slots.values():
            if slot.state is SlotState.SUCCEEDED and self._goodbyes.missed(slot) and self._somebody_goes_on():
                self._goodbyes.settle(slot)
                self._ended_without_leaving(slot)

    def _somebody_goes_on(self) -> bool:
        return not self._nobody_to_join() or not self._all_came_to_their_end()

    def _all_came_to_their_end(self) -> bool:
        """Well, or at least with 0: when nobody is left who would wait for those that had not left, nothing is done again."""
        return all(
            slot.state is SlotState.SUCCEEDED or slot.rank in self._ended_early or self._works_on(slot)
            for slot in self._context.slots.values()
        )

    def _works_on(self, slot: Slot) -> bool:
        """After it has left, for itself."""
        return slot.state is SlotState.RUNNING and self._goodbyes.left(slot)

    def _ended_without_leaving(self, slot: Slot) -> None:
        """Where it does so each time it stays ended in the end: the others may well need it no more."""
        slot.failures += 1
        again = slot.failures <= self._worker_group.spec.max_restarts
        self._log("no-goodbye", rank=slot.rank, incarnation=slot.incarnation, again=again)
        if again:
            slot.state = SlotState.FAILED
            self._ended_early.add(slot.rank)
            self._take_group_along(slot)
            self._start_again(slot)

    # -- all of them -----------------------------------------------------------------------------------------------

    def _nobody_to_join(self) -> bool:
        if self._nodes is not None:  # members may run on other nodes
            return self._stopping
        return self._has_none()

    def _has_none(self) -> bool:
        running = self._context.running()
        if any(self._holds_state(slot) for slot in running):
            return False
        return not running or not self._setting.folder.loses_events()  # else one may have come in, and told so

    def _holds_state(self, slot: Slot) -> bool:
        taken_along = (slot.rank, slot.incarnation) in self._with_group
        return not taken_along and not self._goodbyes.left(slot) and super()._holds_state(slot)

    def _look_for_members(self) -> None:
        """Starts the next generation where nobody of the present one is left."""
        self._look_for_early_ends()
        if self._nodes is None:
            if self._has_none() and self._is_over() and (again := self._failed_slots()):
                self._go_on_without(again)
            return
        generations = self._nodes.generations
        assert generations is not None
        has = Has.MEMBERS if not self._has_none() else Has.DONE if self._all_came_to_their_end() else Has.NONE
        news = generations.tell(has)
        if generations.must_stop:
            self._stopping = True
            if self._is_over():
                news |= generations.stop([slot.rank for slot in self._failed_slots()])
        if news:
            self._nodes.poke()
        if (ranks := generations.take_next()) is not None:
            self._stopping = False
            everybody = range(self._worker_group.workers[0].world_size)
            again = [slot for slot in self._failed_slots() if slot.rank in ranks]  # and not who has failed since
            self._next_generation(again, [rank for rank in everybody if rank not in ranks])
            self._look_for_members()  # what this node has of the new one: it may have nothing, and there is no event to say so

    def _is_over(self) -> bool:
        """Ends what is left of the present generation, but for those that have left it. True: they are dead and reaped (M9)."""
        members = [slot for slot in self._context.running() if not self._works_on(slot)]
        for slot in members:
            if (slot.rank, slot.incarnation) not in self._orphaned:
                self._end_orphan(slot)
        return not members and not self._retries

    def _failed_slots(self) -> list[Slot]:
        return [slot for slot in self._context.slots.values() if slot.state is SlotState.FAILED]

    def _go_on_without(self, again: list[Slot]) -> None:
        if self._all_came_to_their_end():
            for slot in again:
                slot.state = SlotState.SUCCEEDED
        else:
            ranks = [slot.rank for slot in again]
            finished = [slot.rank for slot in self._context.slots.values() if slot.rank not in ranks]
            self._next_generation(again, finished)

    def _waits_for_others(self) -> bool:
        return self._nodes is not None and not self._ending and bool(self._failed_slots())

    def _end_orphan(self, slot: Slot) -> None:
        self._orphaned.add((slot.rank, slot.incarnation))
        if self._all_came_to_their_end():
            self._log("orphaned", rank=slot.rank, incarnation=slot.incarnation, why=TOO_LATE)
        self._kill_one(slot)

    def _next_generation(self, again: list[Slot], finished: list[int]) -> None:
        """``finished``: the ranks that it does without."""
        ranks = [slot.rank for slot in again]
        self._generation += 1
        self._finished = finished
        self._announce()
        if self._nodes is not None:
            self._nodes.write("generation", json.dumps([self._generation, finished]))
        if not again:
            return  # other nodes' workers start
        self._log("generation", generation=self._generation, ranks=ranks, finished=self._finished)
        for slot in again:
            self._next_round(slot)
            self._start(slot, self._context.found, generation=self._generation)

    @property
    def _ending(self) -> bool:
        return self._hopeless or super()._ending

    def _may_replace(self) -> bool:
        return True  # a generation starts all again, whatever is left of their restarts

    def _end_job(self, ended: Exit, why: str) -> None:
        others: list[Slot] = self._context.running()
        # Who had come to its end is started again for its log group's sake.
        self._failures[ended.slot.rank] = self._failure(ended)
        self._log(
            "given-up",
            rank=ended.slot.rank,
            incarnation=ended.incarnation,
            why=why,
            others=len(others),
            ended=[slot.rank for slot in others],
        )
        self._end_all()

    def _failure(self, ended: Exit) -> ProcessFailure:
        return ended.failure or self._context.failure(ended.slot, ended.pid, ended.code)

    def _hear_of_others(self, nodes: Nodes) -> None:
        """Their ranks won't come back, and this node's would wait for them."""
        ended = nodes.ended()
        lost = next((one for one in ended if one[1] in FAILURES), None) or nodes.missing()
        running: list[Slot] = self._context.running()
        needs_others = any(not self._holds_state(slot) and not self._works_on(slot) for slot in running)
        nobody_lets_in = self._store_is_gone and needs_others and not any(self._holds_state(slot) for slot in running)
        if (nodes.store_is_gone and not running) or nobody_lets_in:
            lost = self._worker_group.group_rank, End.UNKNOWN
        if lost is not None and not self._ending and (running or self._waits_for_others()):
            node, how = lost
            self._log("node-failed", node=node, why=WHY[how].format(node), ended=[slot.rank for slot in running])
            for slot in self._failed_slots():  # that were to start again
                self._failures[slot.rank] = self._replaced.get(slot.rank) or self._failure(self._ends[slot.rank])
            self._end_all()
        for node, how in ended:
            self._tell_of_node(node, how)

    def _end_all(self) -> None:
        self._hopeless = True
        self._kill_at = time.monotonic() + self._patience
        self._context.signal_all(signal.SIGTERM)
