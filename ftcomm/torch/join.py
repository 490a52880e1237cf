"""Where replacements come in: a collective point, once a step, at which survivors hand over the state of the training."""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ftcomm._lib import check, lib
from ftcomm.communicator import Communicator, communicator_id
from ftcomm.errors import ConfigError, PeerFailure
from ftcomm.job import Job
from ftcomm.request import Request
from ftcomm.torch import reducer
from ftcomm.torch.groups import backend_of, job_of
from ftcomm.torch.state import TrainingState, blocks

__all__ = ["Join", "join_point"]

_TAG = 0x6A6F696E  # "join": apart from the tags of anybody else on these communicators
_HAS, _NEEDS = 1, 2


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
    step: int = 0
    flags: Any = field(default=None)


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
    point = _points.get(model)
    if point is None:
        point = _points[model] = _make_point(model)
    _leave_if_told(point)
    if point.job.joining:
        _come_in(point)
        return _begin(point, _hand_over(point, model, optimizer, extra, needs=True))
    point.flags.zero_()
    for rank in point.job.waiting():
        point.flags[rank] = 1
    point.everybody.all_reduce(point.flags, "max")
    if not point.flags.any() or point.group.policy != "lossy":
        return _begin(point, Join(point.step, extra or {}, (), point.everybody.alive))
    _request(point.job, "ft_admit").wait()
    return _begin(point, _hand_over(point, model, optimizer, extra, needs=False))


def _make_point(model: Any) -> _Point:
    backend = backend_of(getattr(model, "process_group", None))
    job = job_of(backend)
    policy = ("raise", "lossy", "replay")[backend.policy]
    backend.stand_in = True  # the ranks are replicas: see lossy_hook
    number = communicator_id(job.name, "join_point", backend.comm_id)
    everybody = Communicator.create(job, "join point", id=number, policy="lossy")
    group = Communicator(job, backend.comm_id, backend.comm_name, backend.slots, policy)
    return _Point(job, everybody, group, flags=torch.zeros(job.world_size, dtype=torch.uint8))


def _leave_if_told(point: _Point) -> None:
    from ftcomm.launch import preempt

    if preempt.requested():
        point.job.emit("left", step=point.step)
        point.job.leave()
        sys.exit(0)


def _begin(point: _Point, join: Join) -> Join:
    """The step begins."""
    point.step = join.step + 1
    point.job.emit("step", step=join.step)
    lib()[1].ft_fault_step(join.step)
    return join


def _request(job: Job, function: str) -> Request:
    ffi, C = lib()
    out = ffi.new("ft_request**")
    check(getattr(C, function)(job.handle, out))
    return Request(job, out[0], job.world_size, None, function.removeprefix("ft_"))


def _come_in(point: _Point) -> None:
    if point.group.policy != "lossy":
        raise ConfigError(
            f"This process replaces a dead rank, but the group's policy is {point.group.policy!r}: replacements come in only "
            "under policy 'lossy'. Start with --policy lossy (or Options(policy='lossy')), or without restarts."
        )
    _request(point.job, "ft_join_wait").wait()
    point.job.joining = False


def _hand_over(point: _Point, model: Any, optimizer: Any, extra: dict[str, Any] | None, needs: bool) -> Join:
    """Until nobody needs the state any more: all tell what they have, then each newcomer gets it from one who has it.

    What was agreed by the all-reduce is the same on all ranks; what goes wrong in a transfer in between is only known to its two
    ends, and shows in the next round.
    """
    job, me = point.job, point.job.rank
    state = TrainingState(model, optimizer, extra)
    asked: set[int] = set()
    result_extra, step = dict(extra or {}), point.step
    while True:
        point.flags.zero_()
        point.flags[me] = _NEEDS if needs else _HAS
        point.everybody.all_reduce(point.flags, "max")
        said = point.flags.tolist()
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
                    result_extra, step = _receive(point, state, source, model)
                    needs = False
            except PeerFailure:
                continue
    if hasattr(model, "reducer"):
        reducer.renew(model)
    joined = tuple(rank for rank in sorted(asked) if said[rank] == _HAS)
    return Join(step, result_extra, joined, point.everybody.alive)


def _send(point: _Point, state: TrainingState, newcomer: int, model: Any) -> None:
    _, C = lib()
    to = point.group.slots.index(newcomer)
    more = {"step": point.step, "hooks": reducer.hook_random_states(model) if hasattr(model, "reducer") else []}
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
