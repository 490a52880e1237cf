"""When the workers of several nodes start again together: each node's ftrun knows only its own workers.

A node *lacks members* when some of its workers have failed and none of the present generation runs there that holds the job's
state; a replacement of its may yet be let in by another node's. When no node has members (they lack them, are done, or are gone),
nobody can be let in any more. A node that has found this ends what still runs there, for good, and says which ranks it will start
again. Whoever reads that does the same, even if a worker of its is a member: what was read of all nodes was not read at one
moment, and starting again out of the logs is never wrong, only slow. When all have said it the next generation begins, with the
same ranks on all nodes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Set
from enum import Enum

from ftcomm.launch.board import Board


class Has(Enum):
    """What a node has of the present generation."""

    MEMBERS = "members"
    NONE = "none"  # and it needs some: workers have failed
    DONE = "done"  # all its workers have left, though they may run on for themselves


class Generations:
    """Of one node. The agent's thread tells and asks; :meth:`look` is called by the thread that talks to the store."""

    def __init__(self, board: Board, node: int, nodes: int, generation: int = 0) -> None:
        self._board, self._node = board, node
        self._others = [n for n in range(nodes) if n != node]
        self._lock = threading.Lock()
        self._begin(generation)
        self._written: dict[str, tuple[int, str]] = {}  # by what it says: generation and value

    def _begin(self, generation: int) -> None:
        self._generation = generation
        self._has, self._must_stop = Has.MEMBERS, False
        self._again: list[int] | None = None
        self._all_again: list[int] | None = None
        self.silent: tuple[int, ...] = ()  # the nodes that have neither said their ranks nor finished

    # -- the agent's thread ----------------------------------------------------------------------------------------

    def tell(self, has: Has) -> bool:
        """Whether that is news."""
        with self._lock:
            news, self._has = has is not self._has, has
            return news

    @property
    def lacks_members(self) -> bool:
        return self._has is Has.NONE

    @property
    def waits(self) -> bool:
        """For what other nodes say: nothing runs here."""
        return self._again is not None and self._all_again is None

    @property
    def must_stop(self) -> bool:
        """What runs on this node is to be ended."""
        return self._must_stop

    def stop(self, again: list[int]) -> bool:
        """Nothing of the present generation runs here, or ever will; these ranks start with the next. True the first time."""
        with self._lock:
            first, self._again = self._again is None, again if self._again is None else self._again
            return first

    def take_next(self) -> list[int] | None:
        """The ranks of all nodes that start again, once all have said theirs: the next generation has begun."""
        with self._lock:
            if (again := self._all_again) is not None:
                self._begin(self._generation + 1)
            return again

    # -- the store's thread ----------------------------------------------------------------------------------------

    def write_again(self) -> None:
        """The board has another connection to its store; what the one before was given may not have come."""
        self._written.clear()

    def look(self, finished: Set[int], lost: Set[int]) -> None:
        """Of other nodes: whose workers have all succeeded, and which have ended otherwise."""
        with self._lock:
            generation, has, again = self._generation, self._has, self._again
        self._write(generation, "has", has.value)
        if again is not None:
            self._write(generation, "again", json.dumps(again))
        # A node that has said it, and then finished with the next generation, has said it before it finished.
        saying = {n: self._board.read(f"{generation}/again/{n}") for n in self._others}
        said = {n: value for n, value in saying.items() if value is not None}
        over = (said.keys() - lost) | finished
        ended = over | lost
        alone = all(n in ended or not self._has_members(generation, n) for n in self._others)
        everybody = None
        if again is not None and over.issuperset(self._others):
            everybody = sorted(again + [rank for n in said.keys() - lost for rank in json.loads(said[n])])
        with self._lock:
            if generation == self._generation:
                # Not if a replacement has come in while the store was being read: that is told at the next look.
                self._must_stop |= bool(said) or (has is self._has is Has.NONE and alone)
                self._all_again = everybody
                self.silent = tuple(n for n in self._others if n not in over)

    def _write(self, generation: int, what: str, value: str) -> None:
        if self._written.get(what) != (generation, value):
            self._written[what] = (generation, value)
            self._board.write(f"{generation}/{what}/{self._node}", value)
            self._board.tell()

    def _has_members(self, generation: int, node: int) -> bool:
        return self._board.read(f"{generation}/has/{node}") in (None, Has.MEMBERS.value)
