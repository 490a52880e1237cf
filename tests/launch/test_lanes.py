"""What the timeline picture says each rank was doing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launch.story import DEATH, REPLAY_DEATHS, START, replay_story, story

from ftcomm.launch.folder import Event
from ftcomm.launch.lanes import State, read_timeline
from ftcomm.launch.timeline import main


def test_a_survivor_trains_recovers_waits_and_trains() -> None:
    lane = read_timeline(story()).lanes[0]
    assert [span.state for span in lane.spans] == [
        State.STARTING, State.TRAINING, State.AGREEING, State.REPAIRING, State.TRAINING, State.WAITING, State.TRAINING,
    ]  # fmt: skip
    agreeing, repairing = lane.spans[2:4]
    assert (agreeing.start, agreeing.end) == (DEATH + 0.0009, DEATH + 0.0009 + 0.001)
    assert (repairing.start, repairing.end) == (DEATH + 0.0009 + 0.001, DEATH + 0.0009 + 0.0021)


def test_a_vote_that_has_nothing_to_repair() -> None:
    events = [event for event in story() if event["event"] != "repaired"]
    for event in events:
        if event["event"] == "decided":
            event["text"] = ""
    lane = read_timeline(events).lanes[0]
    assert [span.state for span in lane.spans] == [
        State.STARTING, State.TRAINING, State.AGREEING, State.TRAINING, State.WAITING, State.TRAINING,
    ]  # fmt: skip


def test_the_victims_slot_is_gone_until_its_replacement_is_there() -> None:
    lane = read_timeline(story()).lanes[2]
    assert [span.state for span in lane.spans] == [
        State.STARTING, State.TRAINING, State.GONE, State.WAITING, State.TRANSFER, State.TRAINING,
    ]  # fmt: skip
    assert lane.spans[2].start == DEATH
    assert [mark.text for mark in lane.marks] == [
        "killed in ring.rs.hop at step 20",
        "replacement started",
        "back at step 33",
    ]


def test_the_order_of_lines_does_not_matter() -> None:
    file_by_file = sorted(story(), key=lambda event: event.get("rank", -1))
    assert read_timeline(file_by_file) == read_timeline(story())


def test_one_failure_with_its_figures() -> None:
    (failure,) = read_timeline(story()).failures
    assert failure.known
    assert failure.time == DEATH
    assert failure.rank == 2
    assert set(failure.noticed) == set(failure.repaired) == {0, 1, 3}
    assert failure.evidence == "robust-futex"


def test_a_death_without_last_words_is_dated_by_the_first_who_noticed() -> None:
    events = [event for event in story() if event["event"] != "fault"]
    (failure,) = read_timeline(events).failures
    assert not failure.known
    assert failure.time == DEATH + 0.0009


def test_a_slot_that_stays_vacant_is_gone_to_the_end() -> None:
    events = [e for e in story() if e["time"] <= DEATH + 0.03 or (e["rank"] != 2 and e["event"] in ("step", "exit"))]
    timeline = read_timeline(events)
    assert timeline.lanes[2].spans[-1].state is State.GONE
    assert timeline.lanes[2].spans[-1].end == timeline.end == START + 21


def test_replay_the_others_wait_until_the_replacement_has_caught_up() -> None:
    timeline = read_timeline(replay_story())
    first, second = REPLAY_DEATHS
    lane = timeline.lanes[3]
    assert [span.state for span in lane.spans] == [
        State.STARTING, State.TRAINING, State.WAITING, State.TRAINING, State.WAITING, State.TRAINING,
    ]  # fmt: skip
    assert [(span.start, span.end) for span in lane.spans if span.state is State.WAITING] == [
        (first + 0.002, first + 6),
        (second + 0.002, second + 6),
    ]
    assert timeline.text(State.WAITING) == "waiting for the one that is down"


def test_replay_a_slot_is_down_applies_the_log_and_is_back() -> None:
    lane = read_timeline(replay_story()).lanes[2]
    down = [State.GONE, State.REPLAYING, State.TRAINING]
    assert [span.state for span in lane.spans] == [
        State.STARTING, State.TRAINING, *down, State.WAITING, State.TRAINING, *down,
    ]  # fmt: skip
    gone, replaying = lane.spans[2:4]
    assert (gone.start, replaying.start, replaying.end) == (
        REPLAY_DEATHS[0] + 0.001,
        REPLAY_DEATHS[0] + 4,
        REPLAY_DEATHS[0] + 6,
    )
    assert [mark.text for mark in lane.marks] == [
        "killed by SIGKILL", "replacement started", "caught up", "killed by SIGKILL", "generation 1", "caught up",
    ]  # fmt: skip


def test_replay_who_has_caught_up_waits_for_who_has_not() -> None:
    lane = read_timeline(replay_story()).lanes[0]
    assert [(span.state, span.start, span.end) for span in lane.spans[-3:]] == [
        (State.REPLAYING, START + 40, START + 43),
        (State.WAITING, START + 43, START + 43.2),
        (State.TRAINING, START + 43.2, START + 50),
    ]


def test_replay_who_computes_for_a_replacement() -> None:
    """From its first micro-batch to its last one; of two replacements, to the last one's last."""
    death = REPLAY_DEATHS[0]
    words = [("helping", 2, 4.5), ("helping", 9, 4.6), ("helped", 2, 5.5), ("helped", 9, 5.6)]
    more = [{"time": death + at, "event": name, "rank": 3, "incarnation": 0, "slot": slot} for name, slot, at in words]
    lane = read_timeline(sorted([*replay_story(), *more], key=lambda event: event["time"])).lanes[3]
    assert [(span.state, span.start, span.end) for span in lane.spans[2:5]] == [
        (State.WAITING, death + 0.002, death + 4.5),
        (State.HELPING, death + 4.5, death + 5.6),
        (State.WAITING, death + 5.6, death + 6),
    ]


def test_replay_a_step_begins_while_another_one_catches_up() -> None:
    """A stage that needs nothing of it for the moment: it still waits for it on the whole. Deaths say in which step they were."""
    death, again = REPLAY_DEATHS
    begins = [(death + 5, 3, 0, 7), (again - 1, 1, 0, 8)]
    more = [{"time": t, "event": "step", "rank": r, "incarnation": i, "step": step} for t, r, i, step in begins]
    timeline = read_timeline(sorted([*replay_story(), *more], key=lambda event: event["time"]))
    assert [(span.state, span.end) for span in timeline.lanes[3].spans[2:3]] == [(State.WAITING, death + 6)]
    assert timeline.failures[1].text.endswith(" at step 8")


def test_replay_what_ftrun_ended_is_no_failure() -> None:
    events = [{k: v for k, v in event.items() if k != "waiting"} for event in replay_story()]
    assert len(read_timeline(replay_story()).failures) == 5
    timeline = read_timeline(events)
    assert len(timeline.failures) == 2  # those that others have noticed
    assert "replacement started" not in [mark.text for mark in timeline.lanes[2].marks]


def test_replay_who_has_not_left_has_failed() -> None:
    plain = read_timeline(replay_story())
    events = []
    for event in replay_story():
        if event["event"] == "exit" and event["pid"] == 102:
            end = {**event, "code": 0, "how": "exit code 0"}
            del end["waiting"]
            events += [end, {**event, "event": "no-goodbye", "again": True}]
        else:
            events.append(event)
    timeline = read_timeline(events)
    assert len(timeline.failures) == len(plain.failures)
    assert timeline.lanes[2].marks[0].text == "ended without leaving"
    spans = timeline.lanes[2].spans
    assert [span.state for span in spans[:5]] == [
        State.STARTING, State.TRAINING, State.GONE, State.GONE, State.REPLAYING,
    ]  # fmt: skip
    assert spans[3].start == spans[2].end


def test_replay_a_repaired_operation_ends_the_wait() -> None:
    """Also where the replacement's program has nothing to catch up with: no collective, or it ends before."""
    back = {
        "time": DEATH + 5,
        "event": "repaired",
        "rank": 0,
        "incarnation": 0,
        "comm": "7",
        "seq": 13,
        "ranks": [0, 1],
    }
    waits = read_timeline([*replay_story(), back]).lanes[0].spans[2]
    assert (waits.state, waits.end) == (State.WAITING, DEATH + 5)


@pytest.mark.parametrize("told", [story, replay_story])
def test_a_picture_is_drawn(tmp_path: Path, told: Callable[[], list[Event]]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in told()) + '{"torn')
    assert main([str(path), "-o", str(tmp_path / "run.png")]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_without_events_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("hello\n[1]\n")
    assert main([str(path), "-o", str(tmp_path / "run.png")]) == 1
    assert "events.jsonl of a run folder" in capsys.readouterr().err
    assert main([str(tmp_path / "none.jsonl")]) == 1
