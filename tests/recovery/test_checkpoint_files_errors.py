"""CheckpointFolder: what is said when something can't be done."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from checkpoint_rig import files, forked, newest, state, temporary  # noqa: E402

from ftcomm.errors import ConfigError, SystemFailure  # noqa: E402
from ftcomm.recovery import CheckpointFolder  # noqa: E402
from ftcomm.recovery.checkpoint_files.files import LocalFiles  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")


class Full(io.RawIOBase):
    """A file that takes some bytes, and then the disk is full."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("room", [0, 500, 3000])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, wait: bool) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2):
        folder.save(step, state(step))
    real = LocalFiles._temporary
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "_temporary", lambda self: (lambda path, file: (path, Full(file, room)))(*real(self)))
        with pytest.raises(SystemFailure) as failed:
            folder.save(3, state(3, size=1000), wait=wait)
            folder.wait()
    said = str(failed.value)
    assert "step 3 was not written" in said
    assert str(tmp_path) in said
    assert "No space left on device" in said
    assert "step 1, 2" in said
    assert "Free space" in said
    assert isinstance(failed.value.__cause__, OSError)
    assert temporary(tmp_path) == []
    assert folder.steps() == [1, 2]
    assert newest(folder) == 2
    folder.save(3, state(3))  # the error was said, and there is room again
    assert newest(folder) == 3
    folder.close()


def test_the_kernel_refuses_more_bytes(tmp_path: Path) -> None:
    """A true error from the middle of write(): a limit of the child's file sizes."""
    CheckpointFolder(tmp_path).save(1, state(1))

    def child() -> None:
        torch.set_num_threads(1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        folder = CheckpointFolder(tmp_path)
        with pytest.raises(SystemFailure, match=r"step 2 was not written .*File too large.*step 1\."):
            folder.save(2, state(2, size=20_000))
        assert newest(folder) == 1

    assert forked(child) == 0
    assert list(files(tmp_path)) == [1]
    assert temporary(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_of_each_call_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1))

    for error in (OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()):

        def fail(*_: Any, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(SystemFailure if isinstance(error, OSError) else KeyboardInterrupt):
                folder.save(2, state(2))
        assert temporary(tmp_path) == []
        assert newest(folder) == 1


def test_an_old_one_that_cannot_be_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, state(1))

    def fail(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "unlink", fail)
    with pytest.warns(RuntimeWarning, match=r"step-000000001-.* can't be removed: Operation not permitted"):
        folder.save(2, state(2))
    assert newest(folder) == 2


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "3", None])
def test_keep_is_refused(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ConfigError, match="keep="):
        CheckpointFolder(tmp_path, keep=keep)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "-x", "a b", "a\n", "x" * 101, 3, None])
def test_names_are_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match="name="):
        CheckpointFolder(tmp_path, name=name)


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None])
def test_steps_are_refused(tmp_path: Path, step: Any) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(ConfigError, match="step="):
        folder.save(step, {})
    assert list(tmp_path.iterdir()) == []
    folder.save(1, {})
    # To these a step that can't be there would look like one that is not.
    for call in (folder.load, folder.prune, folder.discard):
        with pytest.raises(ConfigError, match="step="):
            call(step)
    assert folder.steps() == [1]


def test_numpys_integers_are_steps(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=np.int64(1))
    folder.save(np.int64(1), {"a": 1})
    folder.save(np.uint8(2), {"a": 2})
    assert folder.steps() == [2]
    assert folder.load(np.int32(2)) == {"a": 2}


@pytest.mark.parametrize("folder", [3, None, b"bytes", "", "a\0b"])
def test_what_is_no_path_is_refused(folder: Any) -> None:
    with pytest.raises(ConfigError, match="folder="):
        CheckpointFolder(folder)


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for where in ("file", "file/below"):
        with pytest.raises(ConfigError, match="is, or lies in, a file"):
            CheckpointFolder(tmp_path / where)


def test_the_folder_cannot_be_read_or_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path / "a")

    def fail(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:  # modes do not stop root
        patch.setattr(os, "scandir", fail)
        patch.setattr(os, "listdir", fail)
        for call in (folder.newest, folder.steps):
            with pytest.raises(SystemFailure, match="can't be read: Permission denied"):
                call()
        with pytest.raises(SystemFailure, match="can't be used: Permission denied"):
            CheckpointFolder(tmp_path / "a")
    (tmp_path / "a").rmdir()
    with pytest.raises(SystemFailure, match="step 1 was not written .*No such file"):
        folder.save(1, state(1))
