"""Whom a join point takes for gone: events are told by another thread, and may be of a rank's predecessor."""

from __future__ import annotations

from typing import Any

from ftcomm.torch.point import Point, flag_left


def point() -> Any:
    return Point(job=None, everybody=None, group=None, flags=[0, 0, 0, 0], shards=None)  # type: ignore[arg-type]


def left(slot: int, incarnation: int) -> dict[str, Any]:
    return {"event": "removed", "evidence": "left", "slot": slot, "slot_incarnation": incarnation}


def asks(slot: int, incarnation: int) -> dict[str, Any]:
    return {"event": "join-waiting", "slot": slot, "slot_incarnation": incarnation}


def test_a_late_goodbye_of_a_predecessor_does_not_mark_its_successor() -> None:
    here = point()
    here.hear(asks(1, 1))
    here.is_back([1])
    here.hear(left(1, 0))
    assert here.left == frozenset()
    here.hear(left(1, 1))
    assert here.left == {1}


def test_who_is_back_may_leave_again() -> None:
    here = point()
    here.goes([1, 2])
    assert here.left == {1, 2}
    here.is_back([1])
    here.hear(left(1, 0))
    assert here.left == {2}
    here.goes([1])
    assert here.left == {1, 2}


def test_who_gets_the_state_at_the_start_is_the_first_of_its_slot() -> None:
    here = point()
    here.is_back([0, 1, 2])
    here.hear(left(2, 0))
    assert here.left == {2}


def test_events_may_come_while_the_ranks_that_have_left_are_gone_through() -> None:
    """The other thread adds to them in the middle of it."""
    here = point()
    here.goes([0, 2])

    class Flags(list[int]):
        def __setitem__(self, rank: Any, value: Any) -> None:
            super().__setitem__(rank, value)
            here.hear(left(3, 0))

    here.flags = Flags(here.flags)
    flag_left(here)
    assert list(here.flags) == [1, 0, 1, 0]
