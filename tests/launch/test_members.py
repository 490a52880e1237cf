"""Who is a member, by what workers tell, whatever numbers they have in the jobs that scripts make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcomm.events import EventFile
from ftcomm.launch.members import Members


def event(name: str, job: str = "first", **fields: Any) -> dict[str, Any]:
    return {"time": 1.0, "event": name, "job": job, "rank": 0, "incarnation": 0, **fields}


def test_who_was_admitted_to_the_job() -> None:
    members = Members()
    assert members.hear(event("joined", slot=1, slot_incarnation=2))
    assert members.admitted == {(1, 2)}
    assert members.hear(event("refused", rank=3, incarnation=1))
    assert members.refused == {(3, 1)}


def test_who_has_started_is_not_misconfigured() -> None:
    """It may have tried to make a second job, or have tried something else then."""
    members = Members()
    members.hear(event("misconfigured", rank=1))
    members.hear(event("misconfigured", rank=2))
    members.hear(event("started", rank=1, joining=False))
    members.hear(event("started", rank=3, joining=False))
    members.hear(event("misconfigured", rank=3))
    assert members.misconfigured == {(2, 0)}


def test_in_another_job_numbers_say_nothing_of_workers() -> None:
    """Of workers 0, 2 and 3 it is ranks 0, 1 and 2. Whoever is there with others has a state, by its own number."""
    members = Members()
    start = {"joining": False, "world_size": 3}
    assert members.hear(event("started", "first", process=0, **start))
    members.admitted.clear()
    assert members.hear(event("started", "second", process=0, **start))  # it has the same number in both
    assert not members.hear(event("started", "second", rank=1, worker=[2, 1], process=1, **start))
    assert not members.hear(event("joined", "second", slot=1, slot_incarnation=1))
    assert not members.hear(event("removed", "second", slot=2, slot_incarnation=0))
    assert members.admitted == {(0, 0), (2, 1)}
    assert members.hear(event("removed", "first", slot=2, slot_incarnation=0))


@pytest.mark.parametrize(("rank", "incarnation", "worker"), [(2, 1, None), (1, 1, [2, 1]), (2, 0, [2, 1])])
def test_a_worker_says_by_which_numbers_ftrun_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, incarnation: int, worker: list[int] | None
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("FTCOMM_INCARNATION", "1")
    file = EventFile([str(tmp_path)], rank, incarnation)
    file.write({"event": "step"})
    file.close()
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()).get("worker") == worker
