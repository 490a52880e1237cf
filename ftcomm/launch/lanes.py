"""From events to what each rank was doing, when: the pure part of the timeline picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ftcomm.launch.folder import Event


class State(Enum):
    """What a slot's worker does; the value is what the legend says."""

    STARTING = "starting: imports, data, meeting the others"
    TRAINING = "training"
    WAITING = "waiting for a newcomer, or as one to come in"
    REPLAYING = "applying the log"
    HELPING = "computing for a replacement"
    AGREEING = "agreeing on who is dead: noticing, voting"
    REPAIRING = "repairing what was under way"
    UNDOING = "putting a dropped step back"
    TRANSFER = "getting the state, as a newcomer"
    GONE = "gone; later, its replacement is starting"


RECOVERY = (State.AGREEING, State.REPAIRING, State.UNDOING, State.TRANSFER)  # mostly milliseconds
SILENT = "dead or silent"
# Under the policy replay nobody goes on without the others.
REPLAY_TEXTS = {
    State.STARTING: "starting: imports, data, meeting the others",
    State.TRAINING: "normal operation",
    State.WAITING: "waiting for the one that is down",
    State.GONE: "down; later, its replacement is starting",
}


@dataclass(frozen=True)
class Span:
    state: State
    start: float
    end: float


@dataclass(frozen=True)
class Mark:
    """Something to point out at one moment of a lane."""

    time: float
    text: str


@dataclass
class Lane:
    rank: int
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    state: State | None = None
    since: float = 0.0
    step: int | None = None
    began: float = 0.0  # the step
    dropped: int = 0  # steps that were begun and are done again
    lost: float = 0.0  # seconds in them, without recovering
    again: int = 0  # samples in them
    waits_for: tuple[int, ...] = ()
    # Under the policy replay:
    unheard: bool = False  # its worker was started and has given no sign yet
    started: float = 0.0
    frozen: set[object] = field(default_factory=set)  # its communicators that wait for a decision
    helped: set[object] = field(default_factory=set)  # slots for whose replacements it computes

    def enter(self, state: State | None, time: float) -> None:
        """From ``time`` on the slot is in ``state`` (None: its worker has ended well)."""
        if state is self.state:
            return
        if self.state is not None and time > self.since:
            self.spans.append(Span(self.state, self.since, time))
        self.state, self.since = state, time


@dataclass
class Failure:
    """One death: when, when each survivor noticed, and when each had its interrupted operation repaired."""

    rank: int
    time: float
    known: bool  # the victim left word of its death; otherwise ``time`` is when the first survivor noticed
    text: str
    noticed: dict[int, float] = field(default_factory=dict)
    repaired: dict[int, float] = field(default_factory=dict)
    evidence: str = ""
    contributors: int = 0  # to the repaired operation

    @property
    def end(self) -> float:
        return max([self.time, *self.noticed.values(), *self.repaired.values()])


@dataclass
class Timeline:
    lanes: list[Lane]
    failures: list[Failure]
    start: float
    end: float
    policy: str | None = None
    lost_batches: int | None = None  # None: nobody has said

    def text(self, state: State) -> str:
        """What the legend says."""
        return REPLAY_TEXTS.get(state, state.value) if self.policy == "replay" else state.value


class LaneReader:
    """Hears the events of a run, in the order of time as far as it is known, and keeps what each rank was doing."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.lanes = {rank: Lane(rank) for rank in sorted(ranks)}
        self.failures: list[Failure] = []
        self.open: dict[int, Failure] = {}  # the latest death of a slot that nobody has replaced yet
        self.unrepaired: dict[int, list[Failure]] = {}  # by survivor: what it noticed in the step that it is in
        self.incarnation: dict[int, int] = {}
        self.policy: str | None = None
        self.lost_batches: int | None = None
        self.interrupted = False  # ftrun was told to end: who ends now has not failed

    def read(self, event: Event) -> None:
        rank, time = event.get("rank"), event["time"]
        lane = self.lanes.get(rank) if isinstance(rank, int) else None
        if self.policy == "replay" and lane is not None and self._replay(lane, event):
            return
        match event["event"]:
            case "job":
                self.policy = event.get("policy")
            case "interrupted":
                self.interrupted = True
            case "spawn" if lane is not None:
                self._spawn(lane, event)
            case "step" if lane is not None:
                lane.step, lane.began = event.get("step", lane.step), time
                self.unrepaired.pop(lane.rank, None)
                lane.waits_for = ()
                lane.enter(State.TRAINING, time)
            case "step-dropped" if lane is not None:
                self._dropped(lane, event)
            case "awaiting" if lane is not None:
                self._waits(lane, event)
            case "data":
                self.lost_batches = max(self.lost_batches or 0, int(event["lost_batches"]))
            case "decided" if lane is not None and lane.state is State.AGREEING:  # and not one that waits already
                lane.enter(State.REPAIRING if str(event.get("text", "")).strip() else State.TRAINING, time)
            case "fault" if lane is not None and event.get("do") in ("kill", "exit"):
                at = f" in {event['at']}" if event.get("at") else ""
                self._death(lane, time, known=True, text=f"killed{at}")
            case "exit" if lane is not None:
                if event.get("code") == 0 or self.interrupted:
                    lane.enter(None, time)
                    if self.policy == "replay":
                        self._all_go_on(time)
                elif event.get("incarnation", 0) == self.incarnation.get(lane.rank, 0):
                    self._death(lane, time, known=False, text=str(event.get("how", "failed")))
            case "no-goodbye" if lane is not None and event["again"]:
                self._death(lane, time, known=False, text="ended without leaving")
                lane.enter(State.GONE, time)
            case "suspected" if lane is not None:
                self._noticed(lane, event)
            case "repaired" if lane is not None:
                self._recovered(lane, event)
            case "join-waiting":
                newcomer = self.lanes.get(event.get("slot", -1))
                if newcomer is not None and newcomer.state is State.GONE:
                    newcomer.enter(State.WAITING, time)
            case "joined" if lane is not None:
                lane.enter(State.TRANSFER if event.get("slot") == lane.rank else State.WAITING, time)
            case "rejoined":
                self._rejoined(event)
            case "given-up" if lane is not None:
                lane.marks.append(Mark(time, "given up"))

    def _replay(self, lane: Lane, event: Event) -> bool:
        """What means something of its own under the policy replay; True where that was all."""
        kind, time, incarnation = event["event"], event["time"], event.get("incarnation", 0)
        ours = event.get("source") == "ftrun"
        if not ours and incarnation != self.incarnation.get(lane.rank, incarnation):
            return True  # of a worker that has been replaced
        if not ours and lane.unheard:
            lane.unheard = False
            lane.enter(State.REPLAYING if incarnation else State.TRAINING, time)
        match kind:
            case "frozen":
                lane.frozen.add(event.get("comm"))
                if lane.state is State.TRAINING:
                    lane.enter(State.WAITING, time)
            case "decided":
                lane.frozen.discard(event.get("comm"))
                if not self._somebody_is_missing():
                    self._go_on(lane, time)
            case "step":
                lane.step, lane.began = event.get("step", lane.step), time
                if not self._somebody_is_missing():  # else it waits again as soon as it needs that one
                    self._go_on(lane, time)
            case "repaired":
                self._go_on(lane, time)
            case "caught-up":
                if lane.state is State.REPLAYING:
                    lane.frozen.clear()
                    lane.enter(State.WAITING, time)  # for others that have not, if any
                    lane.marks.append(Mark(time, "caught up"))
                    self._all_go_on(time)
            case "helping":
                lane.helped.add(event.get("slot"))
                lane.enter(State.HELPING, time)
            case "helped":
                lane.helped.discard(event.get("slot"))
                if lane.state is State.HELPING and not lane.helped:
                    lane.enter(State.WAITING, time)  # the replacement may still have a step to do
                    if not self._somebody_is_missing():
                        self._go_on(lane, time)
            case "parallel-replay":
                pass
            case "exit" if event.get("code") != 0 and "waiting" not in event and not self.interrupted:
                lane.enter(State.GONE, time)  # ftrun's doing
                lane.marks = [mark for mark in lane.marks if mark.time != lane.started]
            case "joined" | "join-waiting" | "rejoined":
                pass
            case _:
                return False
        return True

    def _somebody_is_missing(self) -> bool:
        return any(lane.state in (State.GONE, State.REPLAYING) for lane in self.lanes.values())

    def _go_on(self, lane: Lane, time: float) -> None:
        if lane.state is State.WAITING and not lane.frozen:
            lane.enter(State.TRAINING, time)
            for failure in self.unrepaired.pop(lane.rank, ()):
                failure.repaired[lane.rank] = time

    def _all_go_on(self, time: float) -> None:
        if not self._somebody_is_missing():
            for lane in self.lanes.values():
                self._go_on(lane, time)

    def _spawn(self, lane: Lane, event: Event) -> None:
        incarnation = event.get("incarnation", 0)
        self.incarnation[lane.rank] = incarnation
        self.open.pop(lane.rank, None)
        lane.frozen.clear()
        lane.unheard, lane.started = True, event["time"]
        if not incarnation:
            lane.enter(State.STARTING, event["time"])
        if "generation" in event:
            lane.marks.append(Mark(event["time"], f"generation {event['generation']}"))
        elif incarnation:
            lane.marks.append(
                Mark(event["time"], "replacement started" if incarnation == 1 else f"replacement {incarnation}")
            )

    def _death(self, lane: Lane, time: float, known: bool, text: str) -> None:
        if lane.step is not None:
            text += f" at step {lane.step}"
        if (earlier := self.open.get(lane.rank)) is not None:
            if not earlier.known and earlier.text.startswith(SILENT):  # what the others could not know
                lane.marks = [Mark(m.time, text) if m.text == earlier.text else m for m in lane.marks]
                earlier.text = text
            return
        failure = Failure(lane.rank, time, known, text)
        self.failures.append(failure)
        self.open[lane.rank] = failure
        lane.enter(State.GONE, time)
        lane.marks.append(Mark(time, text))

    def _dropped(self, lane: Lane, event: Event) -> None:
        begins = max(lane.since, event["time"] - float(event.get("undo", 0.0)))
        lane.enter(State.UNDOING, begins)
        lane.dropped += 1
        lane.again += int(event.get("samples", 0))
        recovering = sum(
            span.end - span.start for span in lane.spans if span.start >= lane.began and span.state in RECOVERY
        )
        lane.lost += max(0.0, begins - lane.began - recovering)

    def _waits(self, lane: Lane, event: Event) -> None:
        missing = tuple(event.get("missing", ()))
        if missing and missing != lane.waits_for:
            lane.marks.append(Mark(event["time"], f"waits for {', '.join(map(str, missing))}"))
        lane.waits_for = missing
        lane.enter(State.WAITING, event["time"])

    def _noticed(self, lane: Lane, event: Event) -> None:
        victim = self.lanes.get(event.get("slot", -1))
        if victim is None or victim is lane or event.get("evidence") == "left":
            return
        alive = victim.state in (State.TRAINING, State.WAITING, State.REPLAYING, State.HELPING, *RECOVERY)
        latest = self.incarnation.get(victim.rank, 0)
        if alive and event.get("slot_incarnation", latest) >= latest:
            self._death(victim, event["time"], known=False, text=SILENT)
        failure = next((f for f in reversed(self.failures) if f.rank == victim.rank), None)
        if failure is None:
            return
        failure.noticed.setdefault(lane.rank, event["time"])
        self.unrepaired.setdefault(lane.rank, []).append(failure)
        failure.evidence = failure.evidence or str(event.get("evidence", ""))
        if lane.state is State.TRAINING and self.policy != "replay":
            lane.enter(State.AGREEING, event["time"])

    def _recovered(self, lane: Lane, event: Event) -> None:
        for failure in self.unrepaired.pop(lane.rank, ()):
            failure.repaired[lane.rank] = event["time"]
            failure.contributors = failure.contributors or len(event.get("ranks", ()))
        if lane.state in (State.AGREEING, State.REPAIRING):
            lane.enter(State.TRAINING, event["time"])

    def _rejoined(self, event: Event) -> None:
        lane = self.lanes.get(event.get("slot", -1))
        if lane is None or lane.state is State.TRAINING:
            return
        lane.enter(State.TRAINING, event["time"])
        step = f" at step {event['step']}" if "step" in event else ""
        lane.marks.append(Mark(event["time"], f"back{step}"))

    def finish(self, start: float, end: float) -> Timeline:
        """The run is over; nothing can be heard any more."""
        for lane in self.lanes.values():
            lane.enter(None, end)
        return Timeline(list(self.lanes.values()), self.failures, start, end, self.policy, self.lost_batches)


def read_timeline(events: Iterable[Event]) -> Timeline:
    """What each rank was doing, from a run's events. ValueError if they tell of no rank."""
    ordered = sorted(events, key=lambda e: e["time"])
    ranks = {e["rank"] for e in ordered if isinstance(e.get("rank"), int)}
    if not ranks:
        raise ValueError(
            "the file tells of no rank; it should be the events.jsonl of a run folder (ftrun --events DIR)"
        )
    reader = LaneReader(ranks)
    for event in ordered:
        reader.read(event)
    return reader.finish(ordered[0]["time"], ordered[-1]["time"])
