"""The state of a training on its way to a newcomer, from several survivors at once: one round between two agreements.

In a round each source greets each of its newcomers with a digest of what it has, and the one that leads also with the header: all
but the tensors' bytes. The newcomer then asks each source for a share of what it still lacks, and they send. What has come stays,
whatever dies: no state changes until all ranks have left the join point, and the digest has the step.

Nobody waits in a circle: all greetings go out before a source waits for what it is asked, and of the blocks both sides have a few
under way for each peer and go from one peer to the next. So the n-th block between two needs only blocks before the n-th, of
others as of themselves.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ftcomm._lib import lib
from ftcomm.errors import PeerFailure, SystemFailure
from ftcomm.request import Request
from ftcomm.torch import reducer
from ftcomm.torch.blocks import Blocks, checksum
from ftcomm.torch.modules import ddp_of
from ftcomm.torch.point import Point
from ftcomm.torch.state import TrainingState
from ftcomm.torch.transfer_plan import deal, indices, pick, spans

__all__ = ["Receiver", "Sender"]

_TAG = 0x6A6F696E  # "join": apart from the tags of anybody else on these communicators
_UNDER_WAY = 2  # blocks of a pair: while one moves, the checksum of another is taken
_HEADER = -1  # among the numbers of blocks


class Sender:
    """A rank that has the state.

    Args:
        state: of this rank. It must not change as long as this object is used.
    """

    def __init__(self, point: Point, state: TrainingState, model: Any) -> None:
        more: dict[str, Any] = {"step": point.step}
        if (ddp := ddp_of(model)) is not None:
            more.update(hooks=reducer.hook_random_states(ddp), layout=reducer.layout_of(ddp))
        self._point = point
        self._header = torch.frombuffer(bytearray(state.pack(more)), dtype=torch.uint8)
        self._state = state
        self._number = len(Blocks(state.tensors, state.own).plan)

    def serve(self, newcomers: dict[int, bool]) -> None:
        """Gives each of them what it asks for; those to whom this rank leads, True, get the header."""
        asked = {rank: wanted for rank in self._greet(newcomers) if (wanted := self._asked_by(rank)) is not None}
        # Each with blocks of its own, which keep a copy of the tensor that they are at if it is not contiguous.
        blocks = {rank: Blocks(self._state.tensors, self._state.own) for rank in asked}
        _by_turns(asked, lambda rank, number: self._send(rank, blocks[rank].read(number)), lambda *_: None)

    def _greet(self, newcomers: dict[int, bool]) -> list[int]:
        under_way: dict[int, list[Request]] = {}
        for rank, leads in newcomers.items():
            size = self._header.numel() if leads else 0
            under_way[rank] = [_isend(self._point, torch.tensor([self._state.digest, size]), rank)]
            if leads:
                under_way[rank] += self._send(rank, self._header)
        return [rank for rank, requests in under_way.items() if _came(requests)]

    def _asked_by(self, rank: int) -> list[int] | None:
        """Numbers of blocks; None: it has died."""
        wanted = torch.zeros(1 + 2 * self._number, dtype=torch.int64)
        if not _came([_irecv(self._point, wanted, rank)]):
            return None
        runs = wanted[1 : 1 + 2 * int(wanted[0])].reshape(-1, 2).tolist()
        return indices((first, end) for first, end in runs)

    def _send(self, rank: int, data: torch.Tensor) -> list[Request]:
        """The checksum comes after what it is of: it is taken while that moves."""
        damaged = lib()[1].ft_fault_hit(b"join.transfer.source") == 1
        moving = _isend(self._point, _damaged(data) if damaged else data, rank)
        return [moving, _isend(self._point, torch.tensor([checksum(data)]), rank)]


class Receiver:
    """A newcomer. Keeps what has come from one round to the next.

    Attributes:
        doubts: what the leading source sent was damaged: the next round needs another one.
    """

    def __init__(self, point: Point, state: TrainingState, model: Any) -> None:
        self._point, self._state, self._model = point, state, model
        self._start = time.monotonic()
        self._links: list[str] = []
        self.doubts = False
        self._digest: int | None = None  # of what has begun to come
        self._lead: int | None = None  # whose header it is; None: it was damaged
        self._blocks = Blocks([])
        self._missing: set[int] = set()
        self._failed: dict[int, list[int]] = {}  # what came damaged, from whom
        self._from: set[int] = set()
        self._rounds = self._moved = 0

    def round(self, sources: tuple[int, ...]) -> bool:
        """Asks the sources for what is missing, the first of them leads; True: now all is there.

        Raises:
            SystemFailure: a block came damaged twice.
        """
        self._rounds += 1
        self._links = self._links or self._point.job.info()["links"]
        self.doubts = False
        greeted, header = self._hear(sources)
        self._settle(sources[0], greeted, header)
        able = [rank for rank in sources if greeted.get(rank) == self._digest is not None]
        few = pick(able, {rank for rank in able if self._links[rank] == "shm"}, cores())
        shares = deal(self._blocks.plan, self._missing, able, few, self._lead, self._failed)
        asked = [self._ask(rank, shares.get(rank, [])) for rank in greeted]
        rooms: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

        def post(rank: int, number: int) -> list[Request]:
            room, sum_ = rooms[rank, number] = self._blocks.room(number), torch.zeros(1, dtype=torch.int64)
            return [_irecv(self._point, room, rank), _irecv(self._point, sum_, rank)]

        _by_turns(shares, post, lambda rank, number: self._take(rank, number, *rooms.pop((rank, number))))
        for request in asked:
            _came([request])
        self._check()
        return self._digest is not None and not self._missing

    def load(self) -> tuple[dict[str, Any], int]:
        """All is there: puts it in its place. Returns the extra state and the step."""
        self._blocks.finish()
        extra, more = self._state.load()
        if (ddp := ddp_of(self._model)) is not None:
            reducer.set_hook_random_states(ddp, more["hooks"])
            reducer.set_layout(ddp, more["layout"])
        job = self._point.job
        job.emit(
            "rejoined",
            slot=job.rank,
            incarnation=job.incarnation,
            step=more["step"],
            bytes=self._state.nbytes,
            moved=self._moved,
            rounds=self._rounds,
            damaged=sum(map(len, self._failed.values())),
            seconds=time.monotonic() - self._start,
            sources=sorted(self._from),
        )
        return extra, int(more["step"])

    def _hear(self, sources: tuple[int, ...]) -> tuple[dict[int, int], torch.Tensor | None]:
        """The digests of those who live, and the leader's header if it came undamaged."""
        lead, header = sources[0], None
        greetings = {rank: torch.zeros(2, dtype=torch.int64) for rank in sources}
        under_way = {rank: _irecv(self._point, greeting, rank) for rank, greeting in greetings.items()}
        greeted = {rank: int(greetings[rank][0]) for rank in sources if _came([under_way[rank]])}
        if lead in greeted:
            header = torch.empty(int(greetings[lead][1]), dtype=torch.uint8)
            sum_ = torch.zeros(1, dtype=torch.int64)
            if not _came([_irecv(self._point, header, lead), _irecv(self._point, sum_, lead)]):
                del greeted[lead]
                header = None
            elif not self._is_whole(lead, _HEADER, header, sum_):
                header = None
            else:
                lib()[1].ft_fault_hit(b"join.transfer.joiner")
        return greeted, header

    def _settle(self, lead: int, greeted: dict[int, int], header: torch.Tensor | None) -> None:
        """Goes on with what has begun to come, or begins with this header.

        What is each rank's own is of one rank, that of the header: if that one has gone before all of it was here, another
        one's takes its place. All else is the same wherever the digest is.
        """
        if header is None:
            return
        kept = self._digest in greeted.values()
        own = {number for number, block in enumerate(self._blocks.plan) if block.own}
        lost = greeted.get(self._lead if self._lead is not None else -1) != self._digest and (
            self._lead is None or bool(own & self._missing)
        )
        if self._digest is not None and kept and not lost:
            return
        again = self._digest == greeted[lead]
        self._state.expect(header.numpy().tobytes())
        self._lead, self._digest = lead, greeted[lead]
        self._from.add(lead)
        if again:
            self._missing |= own
            return
        self._blocks = Blocks(self._state.tensors, self._state.own)
        self._missing = {*range(len(self._blocks.plan))}
        self._failed = {number: ranks for number, ranks in self._failed.items() if number == _HEADER}

    def _ask(self, rank: int, share: list[int]) -> Request:
        runs = spans(share)
        return _isend(self._point, torch.tensor([len(runs), *(end for run in runs for end in run)]), rank)

    def _take(self, rank: int, number: int, room: torch.Tensor, sum_: torch.Tensor) -> None:
        if not self._is_whole(rank, number, room, sum_):
            return
        self._blocks.put(number, room)
        self._missing.discard(number)
        self._moved += room.numel()
        self._from.add(rank)
        lib()[1].ft_fault_hit(b"join.transfer.joiner")

    def _is_whole(self, rank: int, number: int, data: torch.Tensor, sum_: torch.Tensor) -> bool:
        if checksum(data) == int(sum_):
            return True
        self._failed.setdefault(number, []).append(rank)
        if (
            number == _HEADER or self._blocks.plan[number].own
        ):  # the rest of that would have to come from this rank, too
            self._lead, self.doubts = None, True
        return False

    def _check(self) -> None:
        for number, ranks in self._failed.items():
            if len(ranks) < 2:
                continue
            names = ["the header"]
            if number != _HEADER:
                names = [self._state.names[index] for index, _, _ in self._blocks.plan[number].pieces]
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            raise SystemFailure(
                f"The state of the training can't be handed over: {what} came with a wrong checksum twice, from rank "
                f"{' and then from rank '.join(map(str, ranks))}. Memory or a link is damaged, or something on those ranks "
                "writes to the state while it is sent. Look at those machines, and start again from a checkpoint.",
                ranks=ranks,
                operation="join_point",
                epoch=self._point.job.epoch,
            )


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def _by_turns(
    shares: dict[int, list[int]], post: Callable[[int, int], list[Request]], done: Callable[[int, int], None]
) -> None:
    """Moves each peer's blocks in their order, a few under way, until all are done. Who dies is left out."""
    under_way: dict[int, deque[list[Request]]] = {rank: deque() for rank, numbers in shares.items() if numbers}
    for turn in range(max(map(len, shares.values()), default=0) + _UNDER_WAY):
        for rank in [*under_way]:
            before, numbers = turn - _UNDER_WAY, shares[rank]
            if 0 <= before < len(numbers):
                if not _came(under_way[rank].popleft()):
                    del under_way[rank]
                    continue
                done(rank, numbers[before])
            if turn < len(numbers):
                under_way[rank].append(post(rank, numbers[turn]))


def _came(requests: list[Request]) -> bool:
    """Waits; False: the other end has died."""
    try:
        for request in requests:
            request.wait()
    except PeerFailure:
        return False
    return True


def _isend(point: Point, data: torch.Tensor, rank: int) -> Request:
    return point.group.isend(data, point.group.slots.index(rank), _TAG)


def _irecv(point: Point, data: torch.Tensor, rank: int) -> Request:
    return point.group.irecv(data, point.group.slots.index(rank), _TAG)


def _damaged(data: torch.Tensor) -> torch.Tensor:
    copy = data.clone()
    copy[copy.numel() // 2] ^= 1
    return copy
