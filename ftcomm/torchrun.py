"""Which start of a job is this, under torchrun? The same number on all nodes, and another one in each start.

torchrun starts all workers again when one dies, and its agents' store outlives them all. But ``TORCHELASTIC_RESTART_COUNT`` is
counted by each node for itself, and nothing else in the environment tells two starts apart. So the workers agree on a number.

Before agents start workers anew, all workers before them are dead, on all nodes that take part. A process claims its rank in
the lowest number in which no earlier process has done so. When all ranks are claimed, each process confirms that; when all have,
the number is theirs: who confirms is alive after the last rank was claimed, so that none is of an earlier start. Who finds its
rank claimed closes that number, and sends on those of its own start that have claimed theirs where an earlier one had left it.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

from ftcomm.errors import ConfigError, Timeout

__all__ = ["counts_starts", "number_of_start"]

_ALL, _NEXT = "all", "next"


def counts_starts() -> bool:
    """Under torchrun, with its agents' store. (ftrun counts the processes of each rank instead.)"""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "FTCOMM_INCARNATION" not in os.environ


def number_of_start(store: Any, job: str, rank: int, world_size: int, timeout: float) -> int:
    """Collective. ``store``: a torch Store that outlives the workers. ``timeout``: in seconds.

    Raises:
        Timeout: ``missing`` names the ranks that never came.
        ConfigError: two living processes have the same rank.
    """
    deadline, mine = time.monotonic() + timeout, secrets.token_hex(8)
    number, claimed = 0, False
    while True:
        start = _Start(store, f"{job}/start/{number}", world_size, deadline)
        if start.has_size():
            if start.claim(rank, mine):
                claimed = True
                if start.have_all("claimed") and start.have_all("confirmed"):
                    return number
            elif claimed:  # ranks are claimed number by number: an earlier process would have had the last one, too
                raise ConfigError(f"Two processes of job {job!r} are starting as rank {rank}. Check RANK.")
        start.close()
        number += 1


class _Start:
    """One number."""

    def __init__(self, store: Any, key: str, world_size: int, deadline: float) -> None:
        self._store, self._key, self._world_size, self._deadline = store, key, world_size, deadline

    def has_size(self) -> bool:
        return self._first_says("size", str(self._world_size)) == str(self._world_size)

    def claim(self, rank: int, mine: str) -> bool:
        return self._first_says(f"rank/{rank}", mine) == mine

    def have_all(self, what: str) -> bool:
        """This rank has; waits for the others. False: this is not the number."""
        if self._store.add(f"{self._key}/{what}/count", 1) == self._world_size:
            self._first_says(what, _ALL)
        try:
            self._store.wait([f"{self._key}/{what}"], timedelta(seconds=max(0.001, self._deadline - time.monotonic())))
        except Exception:  # noqa: BLE001 - if the store is gone, it does not answer here either
            missing = [rank for rank in range(self._world_size) if not self._store.check([f"{self._key}/rank/{rank}"])]
            raise Timeout(
                f"Rank {', '.join(map(str, missing))} of {self._world_size} never came to the start of the job (timeout). "
                "See its own log, and check that all nodes have the same --nnodes and --rdzv-endpoint.",
                ranks=missing,
                operation="rendezvous",
            ) from None
        return bool(self._store.get(f"{self._key}/{what}").decode() == _ALL)

    def close(self) -> None:
        """Unless it is taken already."""
        for what in ("claimed", "confirmed"):
            self._first_says(what, _NEXT)

    def _first_says(self, name: str, value: str) -> str:
        return str(self._store.compare_set(f"{self._key}/{name}", "", value).decode())
