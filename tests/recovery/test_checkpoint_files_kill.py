"""A process killed while it saves: the set of checkpoints is the old one or the new one, and all are whole."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ftcomm.recovery import CheckpointFolder  # noqa: E402
from ftcomm.recovery.checkpoint_files import content  # noqa: E402

SIZE = 5000  # small: no torch operation here takes a second thread, which a forked child does not have


def state(step: int) -> dict[str, Any]:
    return {"step": step, "w": torch.full((SIZE,), float(step)), "many": [torch.full((7,), step) for _ in range(20)]}


def whole(folder: Path) -> list[int]:
    """The steps that are there. No warning: a damaged file under a right name must not be."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints = CheckpointFolder(folder)  # removes what was left
        found = checkpoints.newest()
    assert not list(folder.glob(".*"))
    assert checkpoints.steps() == sorted({entry.step for entry in checkpoints._entries()})
    for entry in checkpoints._entries():
        loaded = checkpoints._read(entry)
        assert loaded is not None
        assert loaded["step"] in (entry.step, -entry.step)
        assert loaded["w"].tolist() == [float(loaded["step"])] * SIZE
    assert (found is None) == (checkpoints.steps() == [])
    assert found is None or found[0] == checkpoints.steps()[-1]
    return checkpoints.steps()


def killed_in(child: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(module: Any, name: str, number: int, after: bool) -> None:
    """Kills at the nth call, before or after it is done."""
    real, left = getattr(module, name), [number]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            kill()
        done = real(*args, **options)
        if left[0] == 0:
            kill()
        return done

    setattr(module, name, call)


# Where in save(), and whether the new one must be there then (None: the name is, durable or not).
POINTS = [
    (os, "open", 1, False, False),  # the temporary file
    (os, "open", 1, True, False),
    (content._Hashed, "write", 1, True, False),
    (content._Hashed, "write", 9, False, False),
    (content._Hashed, "write", 60, True, False),
    (os, "fsync", 1, False, False),
    (os, "fsync", 1, True, False),
    (os, "replace", 1, False, False),
    (os, "replace", 1, True, True),
    (os, "fsync", 2, False, True),  # of the folder
    (os, "fsync", 2, True, True),
    (os, "unlink", 1, False, True),  # what is beyond keep
    (os, "unlink", 1, True, True),
]


@pytest.mark.parametrize(
    ("wait", "again"), [(True, False), (False, False), (True, True)], ids=["new-step", "thread", "same-step"]
)
@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p[1]}-{p[2]}-{'after' if p[3] else 'before'}")
def test_killed_at_each_call(tmp_path: Path, point: tuple[Any, str, int, bool, bool], wait: bool, again: bool) -> None:
    module, name, number, after, new = point
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2):
        folder.save(step, state(step))
    step = 2 if again else 3

    def child() -> None:
        torch.set_num_threads(1)
        at_call(module, name, number, after)
        folder.save(step, {**state(-step)}, wait=wait)
        folder.wait()

    killed_in(child)
    removed = name == "unlink" and after
    if again:
        assert whole(tmp_path) == [1, 2]
        found = CheckpointFolder(tmp_path).newest()
        assert found is not None
        assert found[1]["step"] == (-2 if new else 2)
        assert len(list(tmp_path.iterdir())) == (3 if new and not removed else 2)
    else:
        assert whole(tmp_path) == ([2, 3] if removed else [1, 2, 3] if new else [1, 2])
    folder.save(4, state(4))  # and it goes on from there
    assert whole(tmp_path) == [3 if new and not again else 2, 4]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("seed", range(30))
def test_killed_at_a_random_time(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    wait, keep = seed % 2 == 0, 1 + seed % 3
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            folder = CheckpointFolder(tmp_path, keep=keep)
            for step in range(1, 1 << 20):
                folder.save(step, state(step), wait=wait)
                os.write(writer, b"x")  # so many are done; with wait=False, one less
        finally:
            os._exit(1)
    os.close(writer)
    done = len(os.read(reader, 1))  # it is at work
    time.sleep(drawn.uniform(0, 0.03))  # the time is what is random here; nothing waits for it
    os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    while told := os.read(reader, 1 << 16):
        done += len(told)
    os.close(reader)
    least = done if wait else done - 1
    steps = whole(tmp_path)
    last = steps[-1] if steps else 0
    assert least <= last <= done + 1
    # The window of the newest; one more at its lower end if the old one was not removed yet.
    window = list(range(max(1, last - keep + 1), last + 1))
    assert steps in (window, [window[0] - 1, *window] if window and window[0] > 1 else window)
