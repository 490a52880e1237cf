"""What SWIFT compares itself with, each as short as it can honestly be: checkpoints of all, and snapshots in memory.

The training is in _strategies_ranks.py and _parallel_ranks.py. State is a list of tensors: the model's and the optimizer's.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "checkpoint.pt"


def tensors_of(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Buffers, parameters and AdamW's state, made here before the first step: a replacement has to have a place for it."""
    found: list[Tensor] = list(model.buffers())
    for p in model.parameters():
        state = optimizer.state[p]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        found += [p.detach(), state["step"], state["exp_avg"], state["exp_avg_sq"]]
    return found


def put_back(state: list[Tensor], saved: list[Tensor]) -> None:
    for now, then in zip(state, saved, strict=True):
        now.copy_(then)


def save(path: Path, iteration: int, state: list[Tensor]) -> None:
    """All of it or nothing: a reader never finds half a file. Not synced to the medium, which is kind to who waits for it."""
    part = path.with_suffix(".part")
    torch.save({"iteration": iteration, "state": state}, part)
    os.replace(part, path)


def load(path: Path, state: list[Tensor]) -> int | None:
    """The iteration that is next, if there is a checkpoint."""
    if not path.exists():
        return None
    saved = torch.load(path, weights_only=True)
    put_back(state, saved["state"])
    return int(saved["iteration"])


class Snapshots:
    """CheckFreq's two phases: a copy while the next forward and backward pass run, and then the disk, in the background.

    The update waits for the copy, for it changes what is copied. One snapshot at a time; two buffers in turn, so that one of
    them is whole whenever somebody dies. Without a path there is no second phase: Elastic Horovod's snapshots, taken so.
    """

    def __init__(self, state: list[Tensor], path: Path | None = None) -> None:
        self._state, self._path = state, path
        self._buffers = [[torch.empty_like(tensor) for tensor in state] for _ in range(2)]
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self.newest: tuple[int, list[Tensor]] | None = None

    def begin(self, iteration: int) -> None:
        self.finish()
        self._copied.clear()
        self._thread = threading.Thread(target=self._work, args=(iteration,))
        self._thread.start()

    def before_update(self) -> None:
        self._copied.wait()

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _work(self, iteration: int) -> None:
        buffer = self._buffers[0]
        put_back(buffer, self._state)
        self._buffers.reverse()
        self.newest = (iteration, buffer)
        self._copied.set()
        if self._path is not None:
            save(self._path, iteration, buffer)
