"""A model's join point on this rank: whom it knows of, and over which communicators it asks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ftcomm.communicator import Communicator, communicator_id
from ftcomm.errors import ConfigError, Unsupported
from ftcomm.job import Job
from ftcomm.torch.groups import backend_of, communicator_of, job_of
from ftcomm.torch.shards import Shards, sharded
from ftcomm.torch.state import check_movable

__all__ = ["DOUBTS", "GOES", "HAS", "LEFT", "NEEDS", "WAITS", "Point", "expect", "flag_left", "point_of"]

# Of a rank that has left and is back, the later one counts. DOUBTS: needs the state, and another source is to lead.
LEFT, HAS, WAITS, NEEDS, DOUBTS, GOES = 1, 2, 3, 4, 5, 6


@dataclass
class Point:
    """A model's join point on this rank."""

    job: Job
    everybody: Communicator  # of its own, so that it works whatever the policy and state of the script's groups
    group: Communicator  # the model's: who holds replicas
    # One for each rank; whether somebody's patience is at its end; the largest place in the data, and the smallest, upside down.
    flags: Any
    shards: Shards | None  # None: the ranks are replicas
    step: int = 0
    expected: tuple[int, ...] = ()  # job ranks that have not said goodbye, the same on all ranks
    newest: dict[int, int] = field(default_factory=dict)  # incarnations that have asked to come in, or are in
    gone: dict[int, int] = field(default_factory=dict)  # incarnations that have left, as far as this rank knows
    lock: threading.Lock = field(default_factory=threading.Lock)  # of these two
    # Who is there, or waits, has changed, or the bell rings.
    news: threading.Event = field(default_factory=threading.Event)

    def hear(self, event: dict[str, Any]) -> None:
        """On the thread that tells of events, which may be late: what it says of a rank may be of its predecessor."""
        if event["event"] in ("join-waiting", "joined"):
            with self.lock:
                _raise(self.newest, event["slot"], event["slot_incarnation"])
        if event["event"] == "removed" and event.get("evidence") == "left":
            with self.lock:
                _raise(self.gone, event["slot"], event["slot_incarnation"])
        if event["event"] in ("removed", "view", "join-waiting", "stale", "authority-lost", "decided"):
            self.news.set()

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have said goodbye, and are not on their way back, as far as this one knows."""
        with self.lock:
            return frozenset(rank for rank, one in self.gone.items() if one >= self.newest.get(rank, 0))

    def goes(self, ranks: Iterable[int]) -> None:
        """All have agreed that these have left, or are leaving."""
        with self.lock:
            for rank in ranks:
                _raise(self.gone, rank, self.newest.get(rank, 0))

    def is_back(self, ranks: Iterable[int]) -> None:
        """All have agreed that these have come in."""
        with self.lock:
            for rank in {*ranks} & {*self.gone}:
                _raise(self.newest, rank, self.gone.pop(rank) + 1)


def _raise(known: dict[int, int], rank: int, incarnation: int) -> None:
    known[rank] = max(known.get(rank, 0), incarnation)


_points: weakref.WeakKeyDictionary[Any, Point] = weakref.WeakKeyDictionary()  # by model
# Of all that were made, as models may go.
_numbers: weakref.WeakKeyDictionary[Job, set[int]] = weakref.WeakKeyDictionary()


def point_of(model: Any) -> Point:
    point = _points.get(model)
    if point is None:
        point = _points[model] = _make_point(model)
    return point


def _make_point(model: Any) -> Point:
    backend = backend_of(getattr(model, "process_group", None))
    job = job_of(backend)
    shards = Shards(model, job.world_size) if sharded(model) else None
    group = communicator_of(backend)
    if group.policy == "replay":
        raise Unsupported(
            "join_point is not for the policy replay: there a replacement comes in by itself, and gets its state by running the "
            "script again. Leave join_point out and count the steps in the script, or start it with `ftrun --policy lossy`.",
            operation="join_point",
        )
    if group.policy == "lossy":
        check_movable(model)
    number = communicator_id(job.name, "join_point", backend.comm_id)
    if number in _numbers.setdefault(job, set()):
        raise ConfigError(
            "There has been a join_point, or an engine, for another model of this process group, and a replacement comes in with "
            "one. Put all models into one module (torch.nn.ModuleDict), or train this one in a job of its own.",
            operation="join_point",
        )
    everybody = Communicator.create(job, "join point", id=number, policy="lossy")
    _numbers[job].add(number)
    flags = torch.zeros(job.world_size + 3, dtype=torch.uint8)
    point = Point(job, everybody, group, flags, shards, expected=tuple(range(job.world_size)))
    job.add_listener(point.hear)
    return point


def flag_left(point: Point) -> None:
    for rank in point.left:
        point.flags[rank] = LEFT


def expect(point: Point, said: list[int], there: tuple[int, ...]) -> None:
    """Who has left is known to all that take part in one all-reduce, as soon as one of them has heard it."""
    point.goes(rank for rank, what in enumerate(said) if what == LEFT and rank not in there)
    point.expected = tuple(rank for rank, what in enumerate(said) if what != LEFT or rank in there)
