"""What the timeline picture says each rank was doing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch.story import DEATH, START, story

from ftcomm.launch.lanes import State, read_timeline
from ftcomm.launch.timeline import main


def test_a_survivor_trains_recovers_waits_and_trains() -> None:
    lane = read_timeline(story()).lanes[0]
    assert [span.state for span in lane.spans] == [
        State.STARTING, State.TRAINING, State.RECOVERING, State.TRAINING, State.WAITING, State.TRAINING,
    ]  # fmt: skip
    recovering = lane.spans[2]
    assert (recovering.start, recovering.end) == (DEATH + 0.0009, DEATH + 0.0009 + 0.0021)


def test_the_victims_slot_is_gone_until_its_replacement_is_there() -> None:
    lane = read_timeline(story()).lanes[2]
    assert [span.state for span in lane.spans] == [
        State.STARTING, State.TRAINING, State.GONE, State.WAITING, State.RECOVERING, State.TRAINING,
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


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in story()) + '{"torn')
    assert main([str(path), "-o", str(tmp_path / "run.png")]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_without_events_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("hello\n[1]\n")
    assert main([str(path), "-o", str(tmp_path / "run.png")]) == 1
    assert "events.jsonl of a run folder" in capsys.readouterr().err
    assert main([str(tmp_path / "none.jsonl")]) == 1
