"""States of training to save, and what a folder has of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ftcomm.recovery import CheckpointFolder


def state(step: int, size: int = 50) -> dict[str, Any]:
    return {"step": step, "model": {"w": torch.full((size,), float(step))}}


def files(folder: Path) -> dict[int, Path]:
    found = {int(path.name.split("-")[1]): path for path in folder.glob("step-*.pt")}
    assert len(found) == len(list(folder.glob("step-*.pt")))
    return dict(sorted(found.items()))


def newest(folder: CheckpointFolder) -> int | None:
    found = folder.newest()
    if found is None:
        return None
    step, loaded = found
    assert loaded["step"] == step
    assert torch.equal(loaded["model"]["w"], state(step)["model"]["w"])
    return step


def temporary(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def forked(child: Callable[[], None]) -> int:
    """The wait status of a child that did it; torch's threads are not in the child."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]
