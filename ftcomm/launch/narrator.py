"""Tells the run on the terminal: one line for each thing that a person wants to know."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from ftcomm.job import missed_fault
from ftcomm.launch.background import BackgroundWriter
from ftcomm.launch.folder import MALFORMED, Event
from ftcomm.launch.summary import Ledger

Key = tuple[Any, ...]


class Narrator:
    """Hears the events of ftrun and of its workers, each of which reports the same happening, and tells it once."""

    def __init__(self, out: TextIO | BackgroundWriter) -> None:
        self._out = out
        self.ledger = Ledger()
        self._start = time.time()
        self._world = 0
        self._replay = False
        self._told: set[Key] = set()
        self._incarnation: dict[int, int] = {}  # of each slot's latest worker
        self._died: dict[tuple[int, int], float] = {}  # (rank, incarnation) -> when, by its own last words
        self._heard: dict[str, Callable[[Event], None]] = {
            "job": self._job,
            "spawn": self._spawn,
            "exit": self._exit,
            "standby-ready": self._standby_ready,
            "standbys-over": self._standbys_over,
            "not-started": self._not_started,
            "given-up": self._given_up,
            "node-failed": self._node_failed,
            "node-ended": self._node_ended,
            "node-back": self._node_back,
            "place-taken": self._place_taken,
            "place-lost": self._place_lost,
            "orphaned": self._orphaned,
            "voted-out": self._voted_out,
            "no-goodbye": self._no_goodbye,
            "generation": self._generation,
            "interrupted": self._interrupted,
            "killing": self._killing,
            "kill-again": self._kill_again,
            "abandoned": self._abandoned,
            "fault": self._fault,
            "fault-missed": self._fault_missed,
            "suspected": self._suspected,
            "repaired": self._repaired,
            "failed": self._failed,
            "stale": self._stale,
            "authority-lost": self._authority_lost,
            "joined": self._joined,
            "rejoined": self._rejoined,
            "caught-up": self._caught_up,
            "parallel-replay": self._parallel_replay,
            "left": self._left,
            "step-dropped": self._step_dropped,
            "awaiting": self._awaiting,
            "replicas-equal": self._replicas_equal,
        }

    def begin(self, world_size: int) -> None:
        self._world = world_size

    def hear(self, event: Event) -> None:
        """Tells it, if it is worth a line. A worker's event that lacks what it should have is not told."""
        self.ledger.hear(event)
        tell = self._heard.get(event["event"])
        if tell is None:
            return
        try:
            tell(event)
        except MALFORMED:
            self._once(("malformed", event["event"]), f"an event that can't be read: {event!r:.200}")

    def say(self, text: str, at: float | None = None) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more, or the terminal is gone: the run goes on
            self._out.write(f"ftrun {(at or time.time()) - self._start:7.2f} s | {text}\n")
            self._out.flush()

    def _once(self, key: Key, text: str, at: float | None = None) -> None:
        if key not in self._told:
            self._told.add(key)
            self.say(text, at)

    # -- ftrun's own events --------------------------------------------------------------------------------------

    def _job(self, event: Event) -> None:
        ranks = event["ranks"]
        where = "" if len(ranks) == self._world else f", ranks {_list(ranks)} on this node"
        self._replay = event.get("policy") == "replay"
        policy = f", policy {event['policy']}" if event.get("policy") else ""  # else it is the script's
        self.say(f"{self._world} workers{where}{policy}", event["time"])

    def _spawn(self, event: Event) -> None:
        rank, incarnation = event["rank"], event["incarnation"]
        self._incarnation[rank] = incarnation
        if incarnation and "generation" not in event:
            how = "started from a standby" if event.get("standby") else "started"
            self.say(f"slot {rank}: replacement {incarnation} {how} (pid {event['pid']})", event["time"])

    def _not_started(self, event: Event) -> None:
        self.say(
            f"slot {event['rank']}: replacement {event['incarnation']} could not be started ({event['error']}); "
            f"again in {event['again_in']:g} s",
            event["time"],
        )

    def _standby_ready(self, event: Event) -> None:
        self.say(f"a standby is ready (pid {event['pid']})", event["time"])

    def _standbys_over(self, event: Event) -> None:
        self.say(
            f"standbys end by themselves, the last one with {event['how']}. No more are started, and replacements start afresh: "
            "try the script's imports by hand, see that there is memory for them, or leave out --standby",
            event["time"],
        )

    def _exit(self, event: Event) -> None:
        if event["code"] == 0:
            return
        if "with_group" in event:
            group = _ranks(event["with_group"]) or "its log group"
            self.say(f"rank {event['rank']} starts again with its log group ({group})", event["time"])
            return
        if "waiting" in event:  # under replay, for its replacement or the next generation
            others = "; the others wait" if event["waiting"] else ""
            how = event["how"].removeprefix("killed by ")
            self.say(f"rank {event['rank']} died ({how}){others}", event["time"])
            return
        self.say(f"rank {event['rank']} ended: {event['how']} (pid {event['pid']})", event["time"])

    def _given_up(self, event: Event) -> None:
        others = " The others run on." if event["others"] else ""
        if event.get("ended"):  # under replay
            others = f" Nobody can go on without it: {_ranks_are(event['ended'])} ended."
        self.say(f"slot {event['rank']} is given up: {event['why']}.{others}", event["time"])

    def _node_failed(self, event: Event) -> None:
        ended = f": {_ranks_are(event['ended'])} ended" if event["ended"] else ""
        self.say(f"{event['why']}. Nobody can go on without it{ended}.", event["time"])

    def _node_ended(self, event: Event) -> None:
        wait = " The others wait for them until their timeout." if self._replay else ""
        back = " if no other ftrun takes its place" if event["node"] > 0 else ""  # which has the store
        self.say(f"{event['why']}: its ranks are not started again{back}.{wait}", event["time"])

    def _node_back(self, event: Event) -> None:
        self.say(f"another ftrun has taken the place of node {event['node']}", event["time"])

    def _place_taken(self, event: Event) -> None:
        self.say(
            f"this node takes the place of node {event['node']}, which is gone: its workers are replacements",
            event["time"],
        )

    def _place_lost(self, event: Event) -> None:
        self.say(
            f"another ftrun has taken the place of node {event['node']}, as this one has given no sign of life: its workers are "
            "killed",
            event["time"],
        )

    def _orphaned(self, event: Event) -> None:
        self.say(f"slot {event['rank']}: the replacement is ended: {event['why']}", event["time"])

    def _voted_out(self, event: Event) -> None:
        self.say(
            f"rank {event['rank']} was voted out by the others and still runs: it is killed (pid {event['pid']})",
            event["time"],
        )

    def _no_goodbye(self, event: Event) -> None:
        then = (
            "it starts again, as after a failure"
            if event["again"]
            else "it has no restarts left, and is taken as finished"
        )
        self.say(
            f"rank {event['rank']} ended with exit code 0, but without leaving (for example by os._exit), while others worked: "
            f"{then}",
            event["time"],
        )
        self._once(
            ("goodbyes",), "leave() says goodbye, and so does the regular end of a script (atexit)", event["time"]
        )

    def _generation(self, event: Event) -> None:
        ranks, finished = event["ranks"], event["finished"]
        done = f"; {_ranks(finished)} had finished" if finished else ""
        self.say(
            f"nobody is left to wait: {_ranks(ranks)} start{'s' if len(ranks) == 1 else ''} again out of "
            f"{'its log' if len(ranks) == 1 else 'their logs'} (generation {event['generation']}){done}",
            event["time"],
        )

    def _interrupted(self, event: Event) -> None:
        name = event["signal"]
        # Under replay they leave only if all ranks of the job are told.
        leave = name == "SIGTERM" and not self._replay
        what = "the workers finish their step and leave" if leave else "the workers are told to end"
        self.say(f"{name}: {what} ({event['patience']} s; once more: at once)", event["time"])

    def _killing(self, event: Event) -> None:
        self.say(f"{_ranks_are(event['ranks'])} killed: {event['why']}", event["time"])

    def _kill_again(self, event: Event) -> None:
        self.say(
            f"rank {event['rank']}: pid {event['pid']} is still there after SIGKILL ({event['state']}); killed again",
            event["time"],
        )

    def _abandoned(self, event: Event) -> None:
        self.say(
            f"rank {event['rank']}: pid {event['pid']} does not die of SIGKILL ({event['state']}); ftrun ends without it",
            event["time"],
        )

    # -- the workers' events -------------------------------------------------------------------------------------

    def _fault(self, event: Event) -> None:
        if event.get("do") in ("kill", "exit"):
            self._died[event["rank"], event["incarnation"]] = event["time"]
        self.say(f"rank {event['rank']}: fault at {event['at']}: {event['do']}", event["time"])

    def _fault_missed(self, event: Event) -> None:
        self.say(missed_fault(event), event["time"])

    def _suspected(self, event: Event) -> None:
        slot, evidence = event["slot"], event["evidence"]
        who = (slot, event["slot_incarnation"])
        if evidence == "group":
            return
        if evidence == "left":
            self._once(("left", *who), f"rank {slot} has left as planned", event["time"])
            return
        died = self._died.get(who)
        after = ""
        if died is not None and event["time"] >= died:
            after = f" after {1000 * (event['time'] - died):.1f} ms"
        elif event.get("silence"):
            after = f" after {event['silence']:.2f} s of silence"
        text = f"rank {slot} is gone: detected by rank {event['rank']}{after}, by {evidence}"
        self._once(("suspected", *who), text, event["time"])

    def _repaired(self, event: Event) -> None:
        ranks = event["ranks"]
        self._once(
            ("repaired", event.get("comm"), event["seq"]),
            f"{event['text']} repaired: contributors {len(ranks)} of {self._world}",
            event["time"],
        )

    def _failed(self, event: Event) -> None:
        self._once(
            ("failed", event.get("comm"), event.get("seq")), f"rank {event['rank']}: {event['text']}", event["time"]
        )

    def _stale(self, event: Event) -> None:
        if event.get("evidence") == "group":
            return  # told at its end
        if ("left", event["rank"], event["incarnation"]) in self._told:
            return  # it has been told why the others go on without it
        self.say(f"rank {event['rank']} was voted out by the others and can't go on", event["time"])

    def _authority_lost(self, event: Event) -> None:
        self._once(
            ("authority",), "the membership cell can't be reached: nobody can be voted out or let in", event["time"]
        )

    def _joined(self, event: Event) -> None:
        slot = event["slot"]
        text = f"rank {slot} replays" if self._replay else f"slot {slot} is a member again"
        self._once(("joined", slot, event["slot_incarnation"]), text, event["time"])

    def _rejoined(self, event: Event) -> None:
        rate = event["bytes"] / max(event["seconds"], 1e-9)
        self._once(
            ("rejoined", event["slot"], event["incarnation"]),
            f"slot {event['slot']} rejoined at step {event['step']}: {_size(event['bytes'])} of state moved at {_size(rate)}/s",
            event["time"],
        )

    def _caught_up(self, event: Event) -> None:
        # Once: each of its communicators tells it, and the first one is at the first operation that is in no log.
        rank = event["rank"]
        self._once(
            ("caught-up", rank, event["incarnation"]), f"rank {rank} has caught up: {event['text']}", event["time"]
        )

    def _parallel_replay(self, event: Event) -> None:
        shares = {int(rank): count for rank, count in event["helpers"].items() if count}
        steps = f"{event['steps']} step{'s' * (event['steps'] != 1)} again"
        done = f"{sum(shares.values())} of {event['micro_batches']} micro-batches were computed by {_ranks(sorted(shares))}"
        self.say(f"rank {event['rank']} has done {steps}: {done if shares else 'nobody has helped'}", event["time"])

    def _left(self, event: Event) -> None:
        step = f" before step {event['step']}" if "step" in event else ""
        self._once(
            ("left", event["rank"], event["incarnation"]), f"rank {event['rank']} left{step}, as told", event["time"]
        )

    def _step_dropped(self, event: Event) -> None:
        missing = event["missing"]
        why = (
            f"{_ranks(missing)} {'have' if len(missing) > 1 else 'has'} no part in it"
            if missing
            else "somebody died in it"
        )
        # More than once, if several die one after another.
        key = ("dropped", event["step"], tuple(missing), tuple(sorted(self._incarnation.items())))
        self._once(key, f"step {event['step']} is done again: {why}", event["time"])

    def _awaiting(self, event: Event) -> None:
        missing = event["missing"]
        key = ("awaiting", event["step"], tuple(missing))
        self._once(key, f"step {event['step']} begins when {_ranks(missing)} will be there again", event["time"])

    def _replicas_equal(self, event: Event) -> None:
        text = f"replicas are equal before step {event['step']}: {event['tensors']} tensors, bit for bit"
        self._once(("equal", event["step"], tuple(event["joined"])), text, event["time"])


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}"


def _ranks_are(ranks: Sequence[int]) -> str:
    return f"{_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'}"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
