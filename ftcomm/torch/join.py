"""Where replacements come in: a collective point, once a step, at which survivors hand over the state of the training."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ftcomm._lib import lib
from ftcomm.communicator import Communicator, communicator_id
from ftcomm.errors import ConfigError, PeerFailure
from ftcomm.job import Job
from ftcomm.torch import reducer
from ftcomm.torch.groups import backend_of, job_of, leave
from ftcomm.torch.state import TrainingState, blocks

__all__ = ["Join", "join_point"]

_TAG = 0x6A6F696E  # "join": apart from the tags of anybody else on these communicators
_LEFT, _HAS, _WAITS, _NEEDS = 1, 2, 3, 4  # of a rank that has left and is back, the later one counts


@dataclass(frozen=True)
class Join:
    """What a join point decided, the same on all ranks but for ``extra``.

    Attributes:
        step: the number of this step: how often the survivors have passed a join point. A replacement goes on from here.
        extra: the survivors' extra state on a rank that has just come in, else what was passed.
        joined: job ranks that came in here.
        alive: job ranks that take part in this step.
    """

    step: int
    extra: dict[str, Any]
    joined: tuple[int, ...]
    alive: tuple[int, ...]


@dataclass
class _Point:
    """A model's join point on this rank."""

    job: Job
    everybody: Communicator  # of its own, so that it works whatever the policy and state of the script's groups
    group: Communicator  # the model's: who holds replicas
    flags: Any  # one for each rank, and whether somebody's patience is at its end
    step: int = 0
    expected: tuple[int, ...] = ()  # job ranks that have not said goodbye, the same on all ranks
    left: set[int] = field(default_factory=set)  # as far as this rank knows
    news: threading.Event = field(default_factory=threading.Event)  # who is there, or waits, has changed

    def hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "removed" and event.get("evidence") == "left":
            self.left.add(event["slot"])
        if event["event"] in ("removed", "view", "join-waiting", "stale", "authority-lost"):
            self.news.set()


_points: weakref.WeakKeyDictionary[Any, _Point] = weakref.WeakKeyDictionary()


def join_point(model: Any, optimizer: Any = None, extra: dict[str, Any] | None = None) -> Join:
    """Lets waiting replacements in and gives them the survivors' state. Collective: every rank, once a step, at the same place.

    Costs one small all-reduce when nobody waits. In a replacement the first call waits until the survivors come to theirs, and
    returns with model, optimizer and extra state loaded. All ranks then get new DDP buckets. If SIGTERM came (a preemption
    notice), this rank leaves the job here and the process exits with status 0.

    Args:
        model: a DistributedDataParallel, or a module that is equal on all ranks.
        optimizer: an optimizer, a list of them, or None.
        extra: more state that is equal on all ranks: plain values, tensors, objects with state_dict/load_state_dict.

    Raises:
        ConfigError: sharded parameters or optimizer state; a replacement under another policy than ``lossy``.
        StaleEpoch: this rank was voted out.
    """
    return enter(model, optimizer, extra)


def enter(
    model: Any, optimizer: Any = None, extra: dict[str, Any] | None = None, complete_within: float | None = None
) -> Join:
    """:func:`join_point`, which may wait until all ranks are there that have not said goodbye.

    Args:
        complete_within: seconds to wait for the replacements of dead ranks; None: goes on without them.

    Raises:
        PeerFailure: on all ranks; ``complete_within`` has passed for one of them.
    """
    point = _point_of(model)
    _leave_if_told(point)
    if point.job.joining:
        _come_in(point)
        return _begin(point, _hand_over(point, model, optimizer, extra, needs=True))
    waiting, there = _who_waits(point, complete_within)
    if not waiting or point.group.policy != "lossy":
        return _begin(point, Join(point.step, extra or {}, (), there))
    point.job.admit().wait()
    return _begin(point, _hand_over(point, model, optimizer, extra, needs=False))


def share(model: Any, optimizer: Any, extra: dict[str, Any] | None, has: bool) -> Join:
    """Collective, before the first step: who has the state (of a checkpoint) gives it to those who have not."""
    return _hand_over(_point_of(model), model, optimizer, extra, needs=not has)


def set_step(model: Any, step: int) -> None:
    """The number of the step that the next join point begins, if it is not to be the one after the last."""
    _point_of(model).step = step


def expected(model: Any) -> tuple[int, ...]:
    """Job ranks that have not said goodbye, alive or not: as the last join point has found, the same on all ranks."""
    return _point_of(model).expected


def everybody(model: Any) -> Communicator:
    """All living ranks of the job, also while some are missing: policy ``lossy``, whatever the script's groups have."""
    return _point_of(model).everybody


def _point_of(model: Any) -> _Point:
    point = _points.get(model)
    if point is None:
        point = _points[model] = _make_point(model)
    return point


def _make_point(model: Any) -> _Point:
    backend = backend_of(getattr(model, "process_group", None))
    job = job_of(backend)
    policy = ("raise", "lossy", "replay")[backend.policy]
    backend.stand_in = True  # the ranks are replicas: see lossy_hook
    number = communicator_id(job.name, "join_point", backend.comm_id)
    everybody = Communicator.create(job, "join point", id=number, policy="lossy")
    group = Communicator(job, backend.comm_id, backend.comm_name, backend.slots, policy)
    flags = torch.zeros(job.world_size + 1, dtype=torch.uint8)
    point = _Point(job, everybody, group, flags, expected=tuple(range(job.world_size)))
    job.add_listener(point.hear)
    return point


def _who_waits(point: _Point, complete_within: float | None) -> tuple[bool, tuple[int, ...]]:
    """Whether somebody asks to come in, and who is there: the same on all ranks, as it is what one all-reduce has found.

    Nobody waits before all have found together who is missing, and then for no others: who waits for a death that the rest does
    not know of lets them time out in the all-reduce.
    """
    deadline = None if complete_within is None else time.monotonic() + complete_within
    missing: list[int] = []
    while True:
        in_time = deadline is None or _wait_for(point, missing, deadline)
        point.flags.zero_()
        point.flags[-1] = not in_time
        _flag_left(point)
        for rank in point.job.waiting():
            point.flags[rank] = _WAITS
        there = point.everybody.all_reduce(point.flags, "max").contributors
        *said, impatient = point.flags.tolist()
        _expect(point, said, there)
        missing = [rank for rank in point.expected if rank not in there and said[rank] != _WAITS]
        if deadline is not None and missing and impatient:
            raise PeerFailure(
                f"No replacement came for rank {', '.join(map(str, missing))} within {complete_within:g} s. Start again from a "
                "checkpoint, or give replacements more time.",
                ranks=missing,
                operation="join_point",
                epoch=point.job.epoch,
            )
        if deadline is None or not missing:
            return any(what == _WAITS for what in said), there
        point.job.emit("awaiting", step=point.step, missing=missing)


def _wait_for(point: _Point, missing: list[int], deadline: float) -> bool:
    """Until all of them ask to come in again, or have left; False when the time is over. Ends early if this rank must."""
    while not point.job.stale:
        point.news.clear()
        if {*point.job.waiting(), *point.left} >= {*missing}:
            return True
        if not point.news.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
            return False
    return True


def _flag_left(point: _Point) -> None:
    for rank in point.left:
        point.flags[rank] = _LEFT


def _expect(point: _Point, said: list[int], there: tuple[int, ...]) -> None:
    """Who has left is known to all that take part in one all-reduce, as soon as one of them has heard it."""
    point.left |= {rank for rank, what in enumerate(said) if what == _LEFT and rank not in there}
    point.expected = tuple(rank for rank, what in enumerate(said) if what != _LEFT or rank in there)


def _leave_if_told(point: _Point) -> None:
    from ftcomm.launch import preempt

    if preempt.requested():
        point.job.emit("left", step=point.step)
        leave(point.job)
        sys.exit(0)


def _begin(point: _Point, join: Join) -> Join:
    """The step begins."""
    point.step = join.step + 1
    point.job.emit("step", step=join.step)
    lib()[1].ft_fault_step(join.step)
    return join


def _come_in(point: _Point) -> None:
    if point.group.policy != "lossy":
        raise ConfigError(
            f"This process replaces a dead rank, but the group's policy is {point.group.policy!r}: replacements come in only "
            "under policy 'lossy'. Start with --policy lossy (or Options(policy='lossy')), or without restarts."
        )
    point.job.join_wait().wait()
    point.job.joining = False


def _hand_over(point: _Point, model: Any, optimizer: Any, extra: dict[str, Any] | None, needs: bool) -> Join:
    """Until nobody needs the state any more: all tell what they have, then each newcomer gets it from one who has it.

    What was agreed by the all-reduce is the same on all ranks; what goes wrong in a transfer in between is only known to its two
    ends, and shows in the next round.
    """
    job, me = point.job, point.job.rank
    state = TrainingState(model, optimizer, extra)
    asked: set[int] = set()
    result_extra = dict(extra or {})
    while True:
        point.flags.zero_()
        _flag_left(point)
        point.flags[me] = _NEEDS if needs else _HAS
        there = point.everybody.all_reduce(point.flags, "max").contributors
        said = point.flags.tolist()[:-1]
        _expect(point, said, there)  # a newcomer has not heard who left before
        asked.update(rank for rank, what in enumerate(said) if what == _NEEDS)
        wanting = [rank for rank in point.group.slots if said[rank] == _NEEDS]
        having = [rank for rank in point.group.slots if said[rank] == _HAS]
        if _NEEDS not in said:
            break
        if wanting and not having:
            raise PeerFailure(
                "All ranks that held the state of the training died before they could hand it over. Start again from a "
                "checkpoint.",
                ranks=[rank for rank, what in enumerate(said) if not what],
                operation="join_point",
                epoch=job.epoch,
            )
        for index, newcomer in enumerate(wanting):
            source = having[index % len(having)]  # several sources at once for several newcomers
            try:
                if me == source:
                    _send(point, state, newcomer, model)
                elif me == newcomer:
                    result_extra, point.step = _receive(point, state, source, model)
                    state = TrainingState(model, optimizer, result_extra)  # it may have to hand it on
                    needs = False
            except PeerFailure:
                continue
    if hasattr(model, "reducer"):
        reducer.renew(model)
    joined = tuple(rank for rank in sorted(asked) if said[rank] == _HAS)
    point.left -= {*joined}
    return Join(point.step, result_extra, joined, there)


def _send(point: _Point, state: TrainingState, newcomer: int, model: Any) -> None:
    _, C = lib()
    to = point.group.slots.index(newcomer)
    more: dict[str, Any] = {"step": point.step}
    if hasattr(model, "reducer"):
        more.update(hooks=reducer.hook_random_states(model), layout=reducer.layout_of(model))
    header = torch.frombuffer(bytearray(state.pack(more)), dtype=torch.uint8)
    point.group.send(torch.tensor([header.numel()]), to, _TAG)
    point.group.send(header, to, _TAG)
    for block in blocks(state.tensors, receiving=False):
        C.ft_fault_hit(b"join.transfer.source")
        point.group.send(block, to, _TAG)


def _receive(point: _Point, state: TrainingState, source: int, model: Any) -> tuple[dict[str, Any], int]:
    _, C = lib()
    start = time.monotonic()
    at = point.group.slots.index(source)
    length = torch.zeros(1, dtype=torch.int64)
    point.group.recv(length, at, _TAG)
    header = torch.empty(int(length), dtype=torch.uint8)
    point.group.recv(header, at, _TAG)
    state.expect(header.numpy().tobytes())
    for block in blocks(state.tensors, receiving=True):
        point.group.recv(block, at, _TAG)
        C.ft_fault_hit(b"join.transfer.joiner")
    extra, more = state.load()
    if hasattr(model, "reducer"):
        reducer.set_hook_random_states(model, more["hooks"])
        reducer.set_layout(model, more["layout"])
    seconds = time.monotonic() - start
    job = point.job
    job.emit(
        "rejoined",
        slot=job.rank,
        incarnation=job.incarnation,
        step=more["step"],
        bytes=state.nbytes,
        seconds=seconds,
        source=source,
    )
    return extra, int(more["step"])
