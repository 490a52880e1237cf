"""What the failures of a run have cost, in words."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import pytest
from launch.running import Start
from launch.speaking import WORKER
from launch.story import DEATH, START, replay_story, story

from ftcomm.launch.folder import Event, read_events, write_events
from ftcomm.launch.lanes import read_timeline
from ftcomm.launch.narrator import Narrator
from ftcomm.launch.summary import Ledger, summary
from ftcomm.launch.timeline import main


def engine_story() -> list[Event]:
    """As :func:`story`, with an engine that drops a step after 0.1 s, undoes it, and waits for the replacement."""
    events = [event for event in story() if not (event["event"] == "step" and START + 17.3 > event["time"] > DEATH)]
    for rank in (0, 1, 3):
        told = {"rank": rank, "incarnation": 0, "step": 20, "missing": [2]}
        events.append({"time": DEATH + 0.1, "event": "step-dropped", "samples": 8, "undo": 0.01, **told})
        events.append({"time": DEATH + 0.2, "event": "awaiting", **told})
    return events


def lines(events: list[Event]) -> dict[str, str]:
    """Each cause's time."""
    return dict(line.strip().split("  ")[::-1] for line in summary(read_timeline(events))[1:])


def test_each_cause_with_the_time_of_all_ranks() -> None:
    first = summary(read_timeline(engine_story()))[0]
    assert first.startswith("1 failure, 1 step (24 samples) done again: 21.2 s of 84 s")
    spent = lines(engine_story())
    assert spent["waiting for others"] == "15.4 s"  # three ranks from 12.2 to 17.3, the newcomer from 16.9 to 17
    assert spent["nobody in a dead rank's place"] == "4.9 s"  # from 12 to 16.9
    assert (
        spent["steps that are done again"] == "264 ms"
    )  # three ranks, 0.09 s after the begin of step 20, but for the repair
    assert spent["putting dropped steps back"] == "330 ms"  # until they wait
    assert spent["noticing and voting"] == "3 ms"
    assert spent["repairing what was under way"] == "3.3 ms"
    assert spent["handing over the state"] == "300 ms"
    assert next(iter(spent)) == "waiting for others"  # the largest first


@pytest.mark.parametrize(("lost", "said"), [(0, "no sample lost"), (1, "1 batch lost"), (5, "5 batches lost")])
def test_what_was_lost_of_the_data(lost: int, said: str) -> None:
    told = {"event": "data", "rank": 0, "incarnation": 0}
    data = [{**told, "time": DEATH + n, "lost_batches": n} for n in range(lost + 1)]
    events = [*engine_story(), *data]
    assert f"done again, {said}: " in summary(read_timeline(events))[0]


def test_a_late_decision_does_not_end_the_wait() -> None:
    """Of another communicator."""
    late = {"time": DEATH + 0.3, "event": "decided", "rank": 0, "incarnation": 0, "comm": "8", "text": "repaired"}
    suspected = {
        "event": "suspected",
        "rank": 0,
        "incarnation": 0,
        "slot": 2,
        "slot_incarnation": 0,
        "evidence": "pidfd",
    }
    events = [*engine_story(), {**suspected, "time": DEATH + 0.25}, late]
    assert lines(events)["waiting for others"] == lines(engine_story())["waiting for others"]


def test_who_waits_for_whom() -> None:
    lanes = read_timeline(engine_story()).lanes
    assert [mark.text for mark in lanes[0].marks] == ["waits for 2"]


def test_a_run_without_failures_has_no_lines() -> None:
    calm = [event for event in story() if event["event"] in ("job", "spawn", "step") and not event.get("incarnation")]
    assert summary(read_timeline(calm)) == []
    assert Ledger().close() == []


def test_who_ends_as_ftrun_was_told_to_has_not_failed() -> None:
    ended = [event for event in story() if event["event"] in ("job", "spawn", "step") and not event.get("incarnation")]
    last = max(event["time"] for event in ended)
    ended.append({"time": last + 1, "event": "interrupted", "source": "ftrun", "signal": "SIGTERM"})
    for rank in range(4):
        ended.append(
            {"time": last + 2, "event": "exit", "source": "ftrun", "rank": rank, "incarnation": 0, "code": -15}
        )
    assert summary(read_timeline(ended)) == []


def test_logs_that_are_applied_are_a_cause_under_replay() -> None:
    assert "applying logs" in lines(replay_story())


@pytest.mark.parametrize("told", [engine_story, replay_story])
def test_added_up_while_it_goes_on_it_is_the_same(told: object) -> None:
    events = sorted(told(), key=lambda event: event["time"])  # type: ignore[operator]
    ledger = Ledger()
    for event in events:
        ledger.hear(event)
        if random.random() < 0.1:
            ledger.hear({"time": event["time"], "event": "step-dropped", "rank": [], "incarnation": "x"})
    assert ledger.close() == summary(read_timeline(events))
    assert ledger.close() == []


def test_ftrun_tells_what_the_engine_does() -> None:
    out = io.StringIO()
    narrator = Narrator(out)
    narrator.begin(4)
    events = engine_story()
    for rank in range(4):
        events.append(
            {"time": START + 17.4, "event": "replicas-equal", "rank": rank, "step": 20, "tensors": 9, "joined": [2]}
        )
    for event in sorted(events, key=lambda event: event["time"]):
        narrator.hear(event)
    said = [line.split("| ")[1] for line in out.getvalue().splitlines()]
    for text in (
        "step 20 is done again: rank 2 has no part in it",
        "step 20 begins when rank 2 will be there again",
        "replicas are equal before step 20: 9 tensors, bit for bit",
    ):
        assert said.count(text) == 1


def test_the_command_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path / "events.jsonl", engine_story())
    assert main([str(tmp_path / "events.jsonl"), "-o", str(tmp_path / "run.svg")]) == 0
    assert "1 failure, 1 step (24 samples) done again" in capsys.readouterr().out


LATE = """
if rank == 1 and incarnation == 0:
    sys.exit(1)
if rank == 1:
    now = time.time()
    event("started", joining=True, time=now - 0.01)
    event("join-waiting", slot=1, slot_incarnation=1, time=now)
    event("rejoined", slot=1, slot_incarnation=1, step=7, seconds=0.01, time=now + 0.03)
    event("step", step=7, time=now + 0.031)
    event("joined", slot=1, slot_incarnation=1, time=now + 0.02)  # by another thread, which was late
    event("step", step=8, time=now + 0.2)
    tell("joined")
else:
    wait("joined")
"""


def test_what_ftrun_says_is_what_the_timeline_says(start: Start, tmp_path: Path) -> None:
    """Of what workers write a part comes late."""
    os.mkfifo(tmp_path / "joined")
    events = tmp_path / "events"
    run = start(WORKER + LATE, "--nproc-per-node", "2", "--policy", "lossy", "--events", str(events))
    code, _, err = run.finish()
    assert code == 0, err
    told = summary(read_timeline(read_events(events / "events.jsonl")))
    assert told
    assert all(line in err for line in told), (err, told)
