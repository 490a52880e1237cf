"""Torch jobs whose dead ranks are replaced, as ftrun does, and what their ends are compared by."""

from __future__ import annotations

import hashlib
import signal
import time
from typing import Any

import torch


class Kept:
    """As ftrun: whoever dies is replaced, until all have ended well."""

    def __init__(self, world: Any, fn: Any, size: int = 4, **options: Any) -> None:
        self.world, self.group, self.size = world, world.start(size, fn, policy="lossy", **options), size
        self.incarnation = [0] * size

    def process(self, rank: int) -> Any:
        return self.group._processes[rank, self.incarnation[rank]]

    def step(self) -> bool:
        """False when all have ended."""
        if all(self.process(rank).result.status == 0 for rank in range(self.size)):
            return False
        for rank in range(self.size):
            if self.process(rank).result.status not in (None, 0):
                assert self.process(rank).result.status == -signal.SIGKILL, self.process(rank).result.text()
                self.incarnation[rank] += 1
                self.world.replace(self.group, rank, self.incarnation[rank])
        self.group._step(time.monotonic() + 60, "all ranks to end")
        return True

    def values(self) -> list[Any]:
        while self.step():
            pass
        return [result.value for result in self.group.results() if result.value is not None]


def digest(net: Any, optimizer: Any) -> str:
    state = hashlib.sha256()
    tensors = [*net.state_dict().values()]
    tensors += [value for values in optimizer.state_dict()["state"].values() for value in values.values()]
    for value in tensors:
        state.update(torch.as_tensor(value).cpu().numpy().tobytes())
    return state.hexdigest()
