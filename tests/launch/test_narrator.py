"""One line for each happening, however many ranks report it."""

from __future__ import annotations

import io

from launch.story import WHAT, replay_story, story

from ftcomm.launch.narrator import Narrator


def told(events: list[dict[str, object]]) -> list[str]:
    out = io.StringIO()
    narrator = Narrator(out)
    narrator.begin(4)
    for event in sorted(events, key=lambda e: e["time"]):  # type: ignore[arg-type,return-value]
        narrator.hear(event)
    return [line.split(" | ", 1)[1] for line in out.getvalue().splitlines()]


def test_the_story_of_one_death() -> None:
    assert told(story()) == [
        "4 workers, policy lossy",
        "rank 2: fault at ring.rs.hop: kill",
        "rank 2 is gone: detected by rank 0 after 0.9 ms, by robust-futex",
        f"{WHAT} repaired: contributors 3 of 4",
        "rank 2 ended: killed by SIGKILL (pid 102)",
        "slot 2: replacement 1 started (pid 110)",
        "slot 2 is a member again",
        "slot 2 rejoined at step 33: 1.2 MB of state moved at 300 MB/s",
    ]


def test_the_story_under_replay() -> None:
    assert told(replay_story()) == [
        "4 workers, policy replay",
        "rank 2 is gone: detected by rank 0, by pidfd",
        "rank 2 died (SIGKILL); the others wait",
        "slot 2: replacement 1 started (pid 112)",
        "rank 2 replays",
        "rank 2 has caught up: 12 results and 30 sends were in the log",
        "rank 1 is gone: detected by rank 0, by pidfd",
        "rank 1 died (SIGKILL); the others wait",
        "slot 1: replacement 1 started (pid 111)",
        "rank 1 replays",
        "rank 1 has caught up: 12 results and 30 sends were in the log",
        "rank 0 died (SIGKILL); the others wait",
        "rank 1 died (SIGKILL); the others wait",
        "rank 2 died (SIGKILL)",
        "nobody is left to wait: ranks 0, 1, 2 start again out of their logs (generation 1); rank 3 had finished",
        "rank 0 has caught up: 40 results and 90 sends were in the log",
        "rank 1 has caught up: 40 results and 90 sends were in the log",
        "rank 2 has caught up: 40 results and 90 sends were in the log",
    ]


def test_steps_that_were_done_again_together() -> None:
    def line(**helpers: int) -> list[str]:
        shares = {"steps": 9, "micro_batches": 54, "helpers": {name[1:]: count for name, count in helpers.items()}}
        return told([{"time": 1.0, "event": "parallel-replay", "rank": 1, "incarnation": 1, **shares}])

    assert line(r0=18, r2=18, r3=0) == [
        "rank 1 has done 9 steps again: 36 of 54 micro-batches were computed by ranks 0, 2"
    ]
    assert line(r0=0) == ["rank 1 has done 9 steps again: nobody has helped"]


def test_who_left_as_told_was_not_voted_out() -> None:
    """The others take it out of the view, and on another host it may hear of that before it ends."""
    left = {"time": 1.0, "event": "left", "rank": 3, "incarnation": 0, "step": 72}
    stale = {"event": "stale", "incarnation": 0, "epoch": 2}
    assert told([left, {**stale, "time": 2.0, "rank": 3}, {**stale, "time": 3.0, "rank": 1}]) == [
        "rank 3 left before step 72, as told",
        "rank 1 was voted out by the others and can't go on",
    ]


def test_a_policy_that_only_the_script_knows_is_not_claimed() -> None:
    assert told([{"time": 1.0, "event": "job", "world_size": 4, "ranks": [0, 1, 2, 3], "policy": None}]) == [
        "4 workers"
    ]


def test_a_fault_that_never_came_is_told() -> None:
    missed = {"event": "fault-missed", "rank": 2, "incarnation": 0, "passes": 5}
    assert told(
        [{"time": 1.0, **missed, "at": "ring.rs.hop:9", "step": 40}, {"time": 2.0, **missed, "at": "step:900"}]
    ) == [
        "rank 2: fault at ring.rs.hop:9 from step 40 on was never reached (passed 5 times)",
        "rank 2: fault at step:900 was never reached",
    ]


def test_without_last_words_no_delay_is_claimed() -> None:
    lines = told([event for event in story() if event["event"] != "fault"])
    assert "rank 2 is gone: detected by rank 0, by robust-futex" in lines


def test_an_event_with_missing_fields_is_told_as_such() -> None:
    (line,) = told([{"time": 1.0, "event": "repaired", "rank": 0}])
    assert "can't be read" in line


def test_events_of_no_interest_are_not_told() -> None:
    assert (
        told([{"time": 1.0, "event": "step", "rank": 0, "step": 3}, {"time": 2.0, "event": "of a later version"}]) == []
    )
