"""CheckpointFolder.save(wait=False): training goes on while a thread writes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from checkpoint_rig import files, newest, state  # noqa: E402

from ftcomm.errors import Closed, SystemFailure  # noqa: E402
from ftcomm.recovery import CheckpointFolder  # noqa: E402
from ftcomm.recovery.checkpoint_files.files import LocalFiles  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = LocalFiles.put
    monkeypatch.setattr(LocalFiles, "put", lambda *args: go_on.wait(60) and real(*args))
    with CheckpointFolder(tmp_path) as folder:
        given = state(1)
        given["list"] = [1]
        folder.save(1, given, wait=False)
        given["model"]["w"].fill_(-1.0)
        given["list"].append(2)
        given["new"] = print
        assert folder.steps() == []
        go_on.set()
        assert newest(folder) == 1
        assert folder.newest()[1]["list"] == [1]  # type: ignore[index]


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would write into the memory that the first is written from."""
    go_on = threading.Event()
    real_put, real_join = LocalFiles.put, threading.Thread.join
    monkeypatch.setattr(LocalFiles, "put", lambda *args: go_on.wait(60) and real_put(*args))

    def join(thread: Any, timeout: Any = None) -> None:
        go_on.set()  # the second save has come to wait: not before may the first go on
        real_join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    with CheckpointFolder(tmp_path) as folder:
        folder.save(1, state(1), wait=False)
        folder.save(2, state(2), wait=False)
        assert go_on.is_set()
        folder.wait()
        found = {step: torch.load(path) for step, path in files(tmp_path).items()}
        assert {step: one["model"]["w"][0].item() for step, one in found.items()} == {1: 1.0, 2: 2.0}


def test_memory_is_used_again(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path) as folder:
        places = []
        for step in range(3):
            folder.save(step, state(step), wait=False)
            places.append([buffer.data_ptr() for buffer in folder._buffers._held])
        assert places[0] == places[1] == places[2]
        assert folder._buffers.nbytes == 200
        folder.save(3, state(3, size=70), wait=False)
        assert folder._buffers.nbytes == 280
        folder.save(4, {}, wait=False)
        assert folder._buffers.nbytes == 0
        folder.save(5, state(5))
        assert folder._buffers.nbytes == 0


@pytest.mark.parametrize("how", ["save", "wait", "close", "exit"])
def test_the_error_of_the_thread_comes_with_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1))

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        folder.save(2, state(2), wait=False)
        assert newest(folder) == 1  # waits, and leaves the error to the others
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: folder.save(3, state(3)),
        "wait": folder.wait,
        "close": folder.close,
        "exit": lambda: folder.__exit__(None, None, None),
    }
    with pytest.raises(SystemFailure, match="step 2 was not written .*No space left"):
        calls[how]()
    folder.close()  # once is enough
    assert list(files(tmp_path)) == [1]


def test_the_exception_under_way_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run() -> None:
        with pytest.raises(KeyError, match="mine"), CheckpointFolder(tmp_path) as folder:
            monkeypatch.setattr(os, "fsync", fail)
            folder.save(2, state(2), wait=False)
            raise KeyError("mine")

    with pytest.warns(RuntimeWarning, match="step 2 was not written"):
        run()


def test_closed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1), wait=False)
    folder.close()
    folder.close()
    assert list(files(tmp_path)) == [1]
    for call in (lambda: folder.save(2, state(2)), folder.newest, folder.steps):
        with pytest.raises(Closed, match="was closed"):
            call()
