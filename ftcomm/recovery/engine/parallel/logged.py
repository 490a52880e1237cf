"""How far the log is ahead of this process, and the mode in which it goes through its sends without their content."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ftcomm._lib import check, lib
from ftcomm.communicator import Communicator
from ftcomm.recovery.engine.parallel.work import Content

__all__ = ["Ahead", "Messages", "Need", "Sent", "ahead_of", "hollow"]


@dataclass(frozen=True)
class Need:
    """Messages of one step, by rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class Ahead:
    """By rank: messages that this process has sent and received, and those that its log still has for it."""

    operations: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    sends_left: tuple[int, ...]
    receives_left: tuple[int, ...]

    @property
    def anything(self) -> bool:
        """A process before this one has been further."""
        return any(self.sends_left)

    def since(self, before: Ahead) -> Need:
        sent = tuple(now - then for now, then in zip(self.sent, before.sent, strict=True))
        return Need(sent, tuple(now - then for now, then in zip(self.received, before.received, strict=True)))

    def holds(self, need: Need) -> bool:
        """A step like that lies wholly in the log: nobody waits for what it sends, and it waits for nobody."""
        enough = zip(self.sends_left + self.receives_left, need.sent + need.received, strict=True)
        return any(need.sent) and all(left >= needed for left, needed in enough)


def ahead_of(comm: Communicator) -> Ahead:
    ffi, C = lib()
    size, needed = 4096, ffi.new("size_t*")
    while True:
        out = ffi.new("char[]", size)
        check(C.ft_comm_ahead(*comm._native, out, size, needed))
        if needed[0] < size:
            found = json.loads(ffi.string(out).decode())
            lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
            return Ahead(operations=found["operations"], **lists)
        size = needed[0] + 1


@dataclass(frozen=True)
class Messages:
    """To one rank, by their numbers in the log."""

    peer: int  # or -1: they are not sent
    numbers: range


class Sent:
    """The messages of a step that belong to its micro-batches. Made before the first of them is sent.

    A stage sends its outputs to the next one in the order of its forward passes, and its inputs' gradients to the one before in
    that of its backward passes: an :class:`~ftcomm.recovery.engine.parallel.observe.Observer` has seen that it does.
    """

    def __init__(self, comm: Communicator, stage: Any) -> None:
        self._comm, self._sent = comm, ahead_of(comm).sent
        ranks = stage.stage_index_to_group_rank
        self._next = None if stage.is_last else ranks[stage.stage_index + 1]
        self._before = None if stage.is_first else ranks[stage.stage_index - 1]
        self._count = {self._next: 0, self._before: 0}

    def forward(self, outputs: int) -> Messages:
        """Of the next forward pass."""
        return self._following(self._next, outputs)

    def backward(self, gradients: int) -> Messages:
        return self._following(self._before, gradients)

    def _following(self, peer: int | None, count: int) -> Messages:
        if peer is None:
            return Messages(-1, range(0))
        first = self._sent[peer] + self._count[peer] + 1
        self._count[peer] += count
        return Messages(peer, range(first, first + count))

    def differing(self, what: str, messages: Messages, found: Sequence[Content]) -> str:
        """How that is not what the log has; "": it is."""
        if messages.peer < 0:
            return ""
        if len(found) != len(messages.numbers):
            return f"{len(found)} and not {len(messages.numbers)} messages for one {what}"
        for number, content in zip(messages.numbers, found, strict=True):
            if content != (logged := logged_of(self._comm, messages.peer, number)):
                return (
                    f"its {what} (message #{number} to rank {messages.peer}) has {content.size} bytes with CRC-32C "
                    f"{content.crc:08x}, and the log has {logged.size} with {logged.crc:08x}"
                )
        return ""


def logged_of(comm: Communicator, rank: int, number: int) -> Content:
    """What this rank's log has as a message to that one."""
    ffi, C = lib()
    size, crc = ffi.new("uint64_t*"), ffi.new("uint32_t*")
    check(C.ft_comm_logged(*comm._native, rank, number, size, crc))
    return Content(size[0], crc[0])


@contextlib.contextmanager
def hollow(comm: Communicator) -> Iterator[None]:
    """Within it, what this rank sends has no content: it must be in the log already, and is compared by tag and size only.

    Another send raises ConfigError, and reaches nobody.
    """
    check(lib()[1].ft_comm_hollow(*comm._native, 1))
    try:
        yield
    finally:
        check(lib()[1].ft_comm_hollow(*comm._native, 0))
