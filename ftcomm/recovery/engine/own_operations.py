"""Collectives that the script makes itself: which results may lack a dead rank's part?

Under the policy ``lossy`` an all-reduce succeeds without the dead. Of the averages of gradients the engine sees who is in them;
of the script's own operations it knows only that there were some, by their number, which is the same on all ranks.
"""

from __future__ import annotations

from typing import Any

from ftcomm.torch import groups

__all__ = ["OwnOperations"]


class OwnOperations:
    """Watches the process groups of all ranks; of others some ranks would know of an operation, and some not.

    Args:
        job: whose groups.
    """

    def __init__(self, job: Any) -> None:
        self._job = job
        self._made: dict[int, Any] = {}  # communicators by their ids
        self._marked: dict[int, int] = {}

    def mark(self) -> None:
        """What was made so far is of no concern any more."""
        self._marked = {one.id: one.operations for one in self._groups()}

    def since(self) -> int:
        """How many operations were made since the mark, the same on all ranks if it was made at the same place."""
        return sum(one.operations - self._marked.get(one.id, 1) for one in self._groups())

    def missing(self, ranks: set[int]) -> set[int]:
        """Of these job ranks: who may not be in all that was made since the mark."""
        made = [one for one in self._groups() if one.operations > self._marked.get(one.id, 1)]
        return {rank for one in made for rank in ranks - {one.slots[there] for there in one.alive}}

    def _groups(self) -> list[Any]:
        found = {backend.comm_id: backend for backend in groups.over_all_ranks(self._job)}
        self._made = {id: self._made.get(id) or groups.communicator_of(found[id]) for id in found}
        return list(self._made.values())
