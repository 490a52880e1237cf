"""The state of a training on its way from those who have it to those who have come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftcomm.errors import PeerFailure
from ftcomm.torch import reducer
from ftcomm.torch.modules import ddp_of
from ftcomm.torch.point import DOUBTS, HAS, NEEDS, Point, expect, flag_left
from ftcomm.torch.shards import reshard
from ftcomm.torch.state import TrainingState
from ftcomm.torch.transfer import Receiver, Sender
from ftcomm.torch.transfer_plan import sources_for

__all__ = ["Join", "hand_over"]


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


def hand_over(point: Point, model: Any, optimizer: Any, extra: dict[str, Any] | None, needs: bool) -> Join:
    """Until nobody needs the state any more: all tell what they have, then each newcomer gets it from those who have it.

    What was agreed by the all-reduce is the same on all ranks; what goes wrong in a transfer in between is only known to its two
    ends, and shows in the next round: who still needs something gets the rest from those who are left.
    """
    me = point.job.rank
    if point.shards is not None:
        reshard(model)  # an evaluation leaves the root whole
    state = TrainingState(model, optimizer, extra, point.shards)
    receiver = Receiver(point, state, model) if needs else None
    sender: Sender | None = None
    asked: set[int] = set()
    turned: dict[int, int] = {}
    result_extra = dict(extra or {})
    while True:
        point.flags.zero_()
        flag_left(point)
        point.flags[me] = HAS if receiver is None else DOUBTS if receiver.doubts else NEEDS
        there = point.everybody.all_reduce(point.flags, "max").contributors
        said = point.flags.tolist()[: point.job.world_size]
        expect(point, said, there)  # a newcomer has not heard who left before
        wanting = [rank for rank in point.group.slots if said[rank] in (NEEDS, DOUBTS)]
        asked.update(wanting)
        turned.update({rank: turned.get(rank, 0) + 1 for rank in wanting if said[rank] == DOUBTS})
        if not wanting:
            break
        served = sources_for({rank: _having(point, said, rank) for rank in wanting}, turned)
        if receiver is None:
            newcomers = {rank: sources[0] == me for rank, sources in served.items() if me in sources}
            if newcomers:
                sender = sender or Sender(point, state, model)
                sender.serve(newcomers)
        elif me in served and receiver.round(served[me]):
            result_extra, point.step = receiver.load()
            receiver = None
            state = TrainingState(model, optimizer, result_extra, point.shards)  # it may have to hand it on
    if (ddp := ddp_of(model)) is not None:
        reducer.renew(ddp)
    joined = tuple(rank for rank in sorted(asked) if said[rank] == HAS)
    point.is_back(joined)
    return Join(point.step, result_extra, joined, there)


def _having(point: Point, said: list[int], newcomer: int) -> list[int]:
    """Who has what the newcomer needs: the same on all ranks, as it follows from what all have said.

    Raises:
        PeerFailure: on all ranks; nobody has it.
    """
    holders = point.group.slots if point.shards is None else point.shards.twins(newcomer)
    having = [rank for rank in holders if said[rank] == HAS]
    if not having:
        what = "the state of the training" if point.shards is None else f"the shards of rank {newcomer}"
        gone = [rank for rank in holders if said[rank] != HAS]
        raise PeerFailure(
            f"Nobody who is alive has {what}: rank {', '.join(map(str, gone))} died before handing it over, or could not "
            "read the checkpoint. Start again from a checkpoint that all ranks can read.",
            ranks=gone,
            operation="join_point",
            epoch=point.job.epoch,
        )
    return having
