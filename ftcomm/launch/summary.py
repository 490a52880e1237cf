"""What the failures of a run have cost, in words: the last lines that ftrun says, and ``ftcomm timeline``."""

from __future__ import annotations

import contextlib

from ftcomm.launch.folder import MALFORMED, Event
from ftcomm.launch.lanes import LaneReader, State, Timeline

__all__ = ["Ledger", "summary"]

CAUSES = {
    State.GONE: "nobody in a dead rank's place",
    State.WAITING: "waiting for others",
    State.AGREEING: "noticing and voting",
    State.REPAIRING: "repairing what was under way",
    State.UNDOING: "putting dropped steps back",
    State.TRANSFER: "handing over the state",
    State.REPLAYING: "applying logs",
    State.HELPING: "computing for replacements",
}


class Ledger:
    """Adds up while the run goes on: memory for its failures, not for its steps."""

    def __init__(self) -> None:
        self._reader: LaneReader | None = None
        self._start = self._end = 0.0

    def hear(self, event: Event) -> None:
        with contextlib.suppress(*MALFORMED):  # the narrator says which event it was that can't be read
            if event["event"] == "job":
                self._reader = LaneReader(event.get("ranks", ()))
                self._start = event["time"]
            if self._reader is not None:
                self._end = max(self._end, event["time"])
                self._reader.read(event)

    def close(self) -> list[str]:
        """The lines, none if nobody has failed. Nothing can be heard afterwards."""
        if self._reader is None:
            return []
        timeline = self._reader.finish(self._start, self._end)
        self._reader = None
        return summary(timeline)


def summary(timeline: Timeline) -> list[str]:
    """Failures and the time that each cause has taken from the ranks, largest first; no lines without a failure."""
    if not timeline.failures:
        return []
    seconds = dict.fromkeys(CAUSES, 0.0)
    total = 0.0
    for lane in timeline.lanes:
        for span in lane.spans:
            total += span.end - span.start
            if span.state in seconds:
                seconds[span.state] += span.end - span.start
    causes = {CAUSES[state]: spent for state, spent in seconds.items()}
    causes["steps that are done again"] = sum(lane.lost for lane in timeline.lanes)
    spent = sum(causes.values())
    count = len(timeline.failures)
    lines = [
        f"{_counted(count, 'failure')}{_again(timeline)}{_lost(timeline)}: "
        f"{_time(spent)} of {_time(total)} of all ranks together went to recovery"
    ]
    lines += [
        f"  {_time(time):>10}  {what}" for what, time in sorted(causes.items(), key=lambda item: -item[1]) if time > 0
    ]
    return lines


def _again(timeline: Timeline) -> str:
    steps = max(lane.dropped for lane in timeline.lanes)
    samples = sum(lane.again for lane in timeline.lanes)
    if not steps:
        return ""
    of = f" ({_counted(samples, 'sample')})" if samples else ""
    return f", {_counted(steps, 'step')}{of} done again"


def _lost(timeline: Timeline) -> str:
    if timeline.lost_batches is None:
        return ""
    return (
        f", {_counted(timeline.lost_batches, 'batch', 'batches')} lost" if timeline.lost_batches else ", no sample lost"
    )


def _counted(n: int, one: str, several: str = "") -> str:
    return f"{n} {one if n == 1 else several or one + 's'}"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.3g} h"
