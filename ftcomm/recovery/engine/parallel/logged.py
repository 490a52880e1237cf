"""How far the log is ahead of this process, and the mode in which it goes through its sends without their content."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from ftcomm._lib import check, lib
from ftcomm.communicator import Communicator

__all__ = ["Ahead", "Need", "ahead_of", "hollow"]


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
