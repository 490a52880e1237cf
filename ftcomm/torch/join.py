"""Where replacements come in: a collective point, once a step, at which survivors hand over the state of the training."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ftcomm.communicator import Communicator, communicator_id
from ftcomm.errors import ConfigError, Mismatch, PeerFailure
from ftcomm.job import begin_step
from ftcomm.launch import preempt
from ftcomm.torch.groups import leave
from ftcomm.torch.handover import Join, hand_over
from ftcomm.torch.point import GOES, WAITS, Point, expect, flag_left, point_of
from ftcomm.torch.shards import Shards, sharded

__all__ = ["Join", "join_point"]


def join_point(model: Any, optimizer: Any = None, extra: dict[str, Any] | None = None) -> Join:
    """Lets waiting replacements in and gives them the survivors' state. Collective: every rank, once a step, at the same place.

    Costs one small all-reduce when nobody waits. In a replacement the first call waits until the survivors come to theirs, and
    returns with model, optimizer and extra state loaded. All ranks then get new DDP buckets. If SIGTERM came (a preemption
    notice), this rank leaves the job here and the process exits with status 0. If it came to ftrun, all of its workers leave at
    the same step.

    Args:
        model: a DistributedDataParallel, or a module that is equal on all ranks.
        optimizer: an optimizer, a list of them, or None.
        extra: more state that is equal on all ranks: plain values, tensors, objects with state_dict/load_state_dict.

    Raises:
        ConfigError: sharded parameters or optimizer state; a replacement under another policy than ``lossy``.
        StaleEpoch: this rank was voted out.
    """
    if sharded(model):
        raise ConfigError(
            "join_point hands over the state of replicas, but the model is sharded (FSDP2): its steps have to be all or nothing "
            "on all ranks. Use ftcomm.recovery.Engine."
        )
    return enter(model, optimizer, extra)


_TOP = 255  # of a flag
_PLACES = _TOP - 4  # places beyond that are told as if they began anew

# Of the ranks that are there.
LastWords = Callable[[tuple[int, ...]], None]


def enter(
    model: Any,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
    complete_within: float | None = None,
    last_words: LastWords | None = None,
    place: int | None = None,
) -> Join:
    """:func:`join_point`, which may wait until all ranks are there that have not said goodbye.

    Args:
        complete_within: seconds to wait for the replacements of dead ranks; None: goes on without them.
        last_words: is called, on all ranks, before a goodbye after which nobody is left who has the state of the training.
        place: in the data, the same on all ranks.

    Raises:
        Mismatch: on all ranks; their places differ.
        PeerFailure: on all ranks; ``complete_within`` has passed for one of them, or one has left that held shards.
    """
    point = point_of(model)
    if point.job.joining:
        _come_in(point)
        return _begin(point, hand_over(point, model, optimizer, extra, needs=True))
    waiting, there = _who_waits(point, complete_within, last_words, place)
    if not waiting or point.group.policy != "lossy":
        return _begin(point, Join(point.step, extra or {}, (), there))
    point.job.admit().wait()
    return _begin(point, hand_over(point, model, optimizer, extra, needs=False))


def share(model: Any, optimizer: Any, extra: dict[str, Any] | None, has: bool) -> Join:
    """Collective, before the first step: who has the state (of a checkpoint) gives it to those who have not."""
    return hand_over(point_of(model), model, optimizer, extra, needs=not has)


def set_step(model: Any, step: int) -> None:
    """The number of the step that the next join point begins, if it is not to be the one after the last."""
    point_of(model).step = step


def expected(model: Any) -> tuple[int, ...]:
    """Job ranks that have not said goodbye, alive or not: as the last join point has found, the same on all ranks."""
    return point_of(model).expected


def shards(model: Any) -> Shards | None:
    """How the model's parameters are spread over the ranks; None: each rank holds all of them."""
    return point_of(model).shards


def everybody(model: Any) -> Communicator:
    """All living ranks of the job, also while some are missing: policy ``lossy``, whatever the script's groups have."""
    return point_of(model).everybody


def _who_waits(
    point: Point, complete_within: float | None, last_words: LastWords | None, place: int | None
) -> tuple[bool, tuple[int, ...]]:
    """Whether somebody asks to come in, and who is there: the same on all ranks, as it is what one all-reduce has found.

    Nobody waits before all have found together who is missing, and then for no others: who waits for a death that the rest does
    not know of lets them time out in the all-reduce.
    """
    deadline: float | None = None
    missing: list[int] = []
    there: tuple[int, ...] = ()
    while True:
        with contextlib.ExitStack() as until_all_are_awake:
            in_time = True
            if deadline is not None:
                bell = until_all_are_awake.enter_context(_bell(point, there))
                in_time = _wait_for(point, missing, deadline, bell)
            point.flags.zero_()
            point.flags[-3] = not in_time
            if place is not None:
                point.flags[-2], point.flags[-1] = 1 + place % _PLACES, _TOP - place % _PLACES
            flag_left(point)
            for rank in point.job.waiting():
                point.flags[rank] = WAITS
            for rank in preempt.told(point.job.rank):
                point.flags[rank] = GOES
            there = point.everybody.all_reduce(point.flags, "max").contributors
        *said, impatient, most, least = point.flags.tolist()
        expect(point, said, there)
        _same_place(most, least)
        if going := {rank for rank, what in enumerate(said) if what == GOES}:
            _part(point, going, there, last_words)
            there = tuple(rank for rank in there if rank not in going)
        missing = [rank for rank in point.expected if rank not in there and said[rank] != WAITS]
        _nobody_left(point)
        if missing and impatient:
            raise PeerFailure(
                f"No replacement came for rank {', '.join(map(str, missing))} within {complete_within:g} s. Start again from a "
                "checkpoint, or give replacements more time.",
                ranks=missing,
                operation="join_point",
                epoch=point.job.epoch,
            )
        if complete_within is None or not missing:
            return any(what == WAITS for what in said), there
        if deadline is None:
            # From now on, when all know of it: so it is over for all at once.
            deadline = time.monotonic() + complete_within
        point.job.emit("awaiting", step=point.step, missing=missing)


def _same_place(most: int, least: int) -> None:
    """The largest place and the smallest, as all have told them: seen at once, when they are not far from each other."""
    if most and most + least != 1 + _TOP:
        raise Mismatch(
            "The ranks are at different places in their data: an epoch, or the loop, ends for some and not for others. All ranks "
            "must have the same number of batches in an epoch, and the same epochs= in engine.steps(). Cut the longer ones, or "
            "give the engine a DataLoader over a map-style dataset, which it deals out evenly.",
            operation="join_point",
        )


def _part(point: Point, going: set[int], there: tuple[int, ...], last_words: LastWords | None) -> None:
    """Some are told to leave, which all have heard together: who stays does not wait for them.

    Nor for the dead among them: their launcher is told to end, and starts no replacement any more.
    """
    stay = {*there} - going
    if last_words is not None and (point.shards is not None or not stay):
        last_words(there)
    if point.job.rank in going:
        _leave(point)
    point.goes(going)
    point.expected = tuple(rank for rank in point.expected if rank not in going)


def _nobody_left(point: Point) -> None:
    """Sharded models need all: who goes takes its shards along, and its place in the gatherings of all others'."""
    gone = {*range(point.job.world_size)} - {*point.expected}
    if point.shards is None or not gone:
        return
    if preempt.requested():  # all were told to, one by one, and some have heard it one step earlier
        _leave(point)
    raise PeerFailure(
        f"Rank {', '.join(map(str, sorted(gone)))} has left the job, and a sharded model can't be trained without its shards. "
        "Start again from a checkpoint.",
        ranks=sorted(gone),
        operation="join_point",
        epoch=point.job.epoch,
    )


def _leave(point: Point) -> NoReturn:
    point.job.emit("left", step=point.step)
    leave(point.job)
    sys.exit(0)


def _bell(point: Point, there: tuple[int, ...]) -> Communicator:
    """Whoever revokes it wakes all that wait. To be closed when all are awake: a revocation needs the votes of all."""
    # The number of the next operation is the same on all, also on who has come in later.
    number = communicator_id(point.job.name, "bell", point.everybody.id, point.everybody.stats()["operations"])
    return Communicator.create(point.job, "the join point's bell", there, id=number, policy="lossy")


def _wait_for(point: Point, missing: list[int], deadline: float, bell: Communicator) -> bool:
    """Until all ask to come in again, or have left; False when the time is over. Ends early, for all, if one must leave."""
    try:
        with preempt.interrupting():
            while not point.job.stale:
                point.news.clear()
                if bell.revoked or {*point.job.waiting(), *point.left} >= {*missing}:
                    break
                if not point.news.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    return False
    except preempt.Preempted:
        bell.revoke()  # of whom, the others hear in the all-reduce that follows
    return True


def _begin(point: Point, join: Join) -> Join:
    """The step begins."""
    point.step = join.step + 1
    begin_step(point.job, join.step)
    return join


def _come_in(point: Point) -> None:
    if point.group.policy != "lossy":
        raise ConfigError(
            f"This process replaces a dead rank, but the group's policy is {point.group.policy!r}: replacements come in only "
            "under policy 'lossy'. Start with --policy lossy (or Options(policy='lossy')), or without restarts."
        )
    _wait_to_be_let_in(point)
    point.job.joining = False


def _wait_to_be_let_in(point: Point) -> None:
    """SIGTERM to all ranks: nobody is going to need it. To some: the others may be about to let it in, and hear of it as of any
    other rank's, at the next join point; if it left by itself they would wait for another replacement.
    """
    request, told = point.job.join_wait(), False
    everyone = frozenset(range(point.job.world_size))
    while True:
        try:
            with preempt.interrupting(again=told):
                if told and preempt.notice() >= everyone:
                    break
                request.wait()
                return
        except preempt.Preempted:
            told = True
        except PeerFailure:
            if not told:
                raise
            break  # all others have left: each was told to by itself
    _leave(point)
