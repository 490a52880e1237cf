"""A host takes the place of one that is gone: ftrun, started there by the same command, starts that node's workers again.

Each node's place has a *tenant*, the ftrun that runs its workers; the rendezvous store says who, and counts them. One that comes
later takes a place by compare-and-set if its tenant has said that it ends, without success, or has ended without a word: on this
host that is known, of another one it is taken for so when it has counted up no beat for :data:`SILENT` seconds. It may live after
all, stopped or cut off: when it looks next it sees that it is none any more, kills its workers and ends. Until then both have
workers for the same ranks; who of them are members the job decides by itself, as the later ones have higher incarnations. What a
tenant writes of the node has its number, so that whatever an earlier one still writes is nobody's.

Who may come in, and when, is in :mod:`ftcomm.launch.entrance`.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from enum import Enum

from torch.distributed.elastic.rendezvous import RendezvousClosedError

from ftcomm.boot import boot_id
from ftcomm.launch.board import Board
from ftcomm.launch.pair_log import start_time

SILENT = 16.0  # seconds without a beat, when three were due
MOST = 4.0  # seconds of it that one look counts for: whoever looks may have been stopped, and the store with all beats, too


class End(Enum):
    """How a node's workers ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # a slot was given up
    INTERRUPTED = "interrupted"  # Ctrl-C, a terminal that was closed
    LEFT = "left"  # SIGTERM: the machine is taken away
    GONE = "gone"  # not said by itself: its ftrun has died
    UNKNOWN = "unknown"  # the store has gone before anything was known
    BACK = "back"  # not any more: another ftrun has taken its place


@dataclass(frozen=True)
class Place:
    """A node's, as its tenant has got it."""

    node: int
    tenant: str  # who that is; empty: of a store that can't compare and set, where nobody takes places
    number: int = 1  # of the tenant
    incarnation: int = 0  # of its first workers
    before: End = End.GONE  # how the tenant before has ended
    # Under replay: the generation that the job was in, and the ranks that this does without.
    generation: int = 0
    finished: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.number == 1


class Places(Board):
    """With what it says of them."""

    def beat(self, node: int) -> None:
        self.count(f"beat/{node}")

    def beats(self, node: int) -> int:
        return self.count(f"beat/{node}", 0)

    def tenant(self, node: int) -> str | None:
        return self.read(f"tenant/{node}")

    def number(self, node: int) -> int:
        """Of the tenant; 1 also if it is not there yet."""
        tenant = self.tenant(node)
        return 1 if tenant is None else _number_of(tenant)

    def end_of(self, node: int, number: int) -> End | None:
        """Of that tenant."""
        said = self.read(f"end/{node}/{number}")
        return None if said is None else End(said)

    def write_end(self, place: Place, end: End) -> None:
        self.write(f"end/{place.node}/{place.number}", end.value)
        self.tell()

    def found(self, node: int, workers: int) -> Place | None:
        """The place of a node that nobody has had yet."""
        tenant = _tenant(1, workers)
        try:
            held = self.replace(f"tenant/{node}", "", tenant)
        except (RuntimeError, AttributeError):  # etcd's
            return Place(node, "")
        return Place(node, tenant) if held == tenant else None

    def take(self, node: int, before: str, workers: int) -> Place | None:
        """The place of a node whose tenant is gone; None: somebody else was faster. RendezvousClosedError: nobody can take it."""
        if (finished := self.read(f"finished/{node}")) is not None:
            raise RendezvousClosedError(f"the place of node {node} can't be taken: ranks {finished} had finished there")
        number = _number_of(before) + 1
        tenant = _tenant(number, workers)
        ended = self.end_of(node, number - 1) or End.GONE
        if self.replace(f"tenant/{node}", before, tenant) != tenant:
            return None
        generation, finished_ranks = json.loads(self.read("generation") or "[0, []]")
        self.tell()
        return Place(
            node, tenant, number, self._next_incarnation(node, number), ended, generation, tuple(finished_ranks)
        )

    def close(self, node: int, before: str) -> None:
        """Nobody has it any more: its tenant, should it live after all, ends as one whose place was taken. (All who do this do
        the same.)
        """
        number, workers = before.split()[:2]
        self.replace(f"tenant/{node}", before, f"{int(number) + 1} {workers} - {_NOWHERE} 0 0")

    def _next_incarnation(self, node: int, number: int) -> int:
        """Above those of all tenants before; one that has written none has started nobody."""
        used = [self.read(f"incarnation/{node}/{one}") for one in range(1, number)]
        return max((int(one) for one in used if one is not None), default=0) + 1


class Silence:
    """For how long something that is counted up has stayed the same, in looks."""

    def __init__(self, most: float = MOST) -> None:
        self._most = most
        self.seconds = 0.0
        self.has_changed = False
        self._value: object = None
        self._at: float | None = None

    def look(self, began: float, value: object) -> None:
        """``began``: when the store was asked for it, which may take its time."""
        if self._at is not None:
            is_same = value == self._value
            self.seconds = self.seconds + min(began - self._at, self._most) if is_same else 0.0
            self.has_changed = self.has_changed or not is_same
        self._value, self._at = value, time.monotonic()


@dataclass
class _Look:
    """What was there when a place was last looked at."""

    tenant: str
    end: End | None
    silence: Silence  # of whatever tenant

    @property
    def is_gone(self) -> bool:
        return _is_dead(self.tenant) or self.silence.seconds >= SILENT


class Watch:
    """Of places that may get free. What it says is of the last look."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._seen: dict[int, _Look] = {}

    def look(self, places: Places, node: int) -> None:
        began, tenant = time.monotonic(), places.tenant(node)
        before = self._seen.pop(node, None)
        if tenant is None:
            return
        silence = Silence() if before is None else before.silence
        beats, end = places.beats(node), places.end_of(node, _number_of(tenant))
        silence.look(began, (tenant, beats, end))  # that it ends is a sign of life, too
        self._seen[node] = _Look(tenant, end, silence)

    def end(self, node: int) -> End | None:
        """How its tenant's workers have ended, if it has said so."""
        return self._seen[node].end if node in self._seen else None

    def close(self, places: Places, node: int) -> None:
        """A place whose run begins anew: see Places."""
        if (seen := self._seen.get(node)) is not None and seen.end is None:
            places.close(node, seen.tenant)

    def has_lived(self, node: int) -> bool:
        """Whether a tenant has shown itself since the first look."""
        return node in self._seen and self._seen[node].silence.has_changed

    def lives(self, node: int) -> bool:
        """And still does, its workers, too."""
        return self.has_lived(node) and not self.is_over(node)

    def is_well(self, node: int) -> bool:
        """And is not on its way to be taken for gone: all may have been lost at once, of which one looks so first."""
        return self.lives(node) and self._seen[node].silence.seconds < SILENT / 2

    def is_over(self, node: int) -> bool:
        """Its workers have ended, or its tenant is gone."""
        return node not in self._seen or self._seen[node].end is not None or self._seen[node].is_gone

    def free(self, node: int) -> str | None:
        """The tenant that it had, if there is none any more. RendezvousClosedError: nobody with so many workers can take it."""
        if (seen := self._seen.get(node)) is None:
            return None
        if seen.end is End.SUCCEEDED:
            raise RendezvousClosedError(f"the workers of node {node} have succeeded")
        if seen.end is None and not seen.is_gone:
            return None
        if (had := int(seen.tenant.split()[1])) != self._workers:
            raise RendezvousClosedError(
                f"node {node} had {had} workers, and whoever takes its place has to have as many: --nproc-per-node {had}"
            )
        return seen.tenant


_NOWHERE = "nowhere"


def _tenant(number: int, workers: int) -> str:
    pid = os.getpid()
    return f"{number} {workers} {secrets.token_hex(8)} {_here()} {pid} {start_time(pid)}"


def _number_of(tenant: str) -> int:
    return int(tenant.split()[0])


def _here() -> str:
    """Where a process has one number."""
    return f"{boot_id() or secrets.token_hex(8)}/{os.stat('/proc/self/ns/pid').st_ino}"


def _is_dead(tenant: str) -> bool:
    """For certain: of a process that has had a number here."""
    _, _, _, where, pid, start = tenant.split()
    return where == _NOWHERE or (where == _here() and str(start_time(int(pid))) != start)
