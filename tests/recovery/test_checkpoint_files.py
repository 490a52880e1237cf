"""CheckpointFolder: what is kept, what is found after damage, what is said when something can't be done."""

from __future__ import annotations

import errno
import io
import os
import random
import re
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ftcomm.errors import Closed, ConfigError, SystemFailure  # noqa: E402
from ftcomm.recovery import CheckpointFolder  # noqa: E402
from ftcomm.recovery.checkpoint_files.files import LocalFiles  # noqa: E402


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


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


def test_saves_and_finds_and_plain_torch_reads_the_file(tmp_path: Path) -> None:
    where = tmp_path / "a" / "b"
    with CheckpointFolder(where) as folder:
        assert folder.steps() == []
        assert folder.newest() is None
        folder.save(120, state(120))
        assert folder.steps() == [120]
        assert newest(folder) == 120
    (path,) = where.iterdir()
    assert re.fullmatch(r"step-000000120-[0-9a-f]{32}\.pt", path.name)
    loaded = torch.load(path, weights_only=True)
    assert loaded["step"] == 120
    assert newest(CheckpointFolder(os.fspath(where))) == 120


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("wait", [True, False])
def test_keeps_the_newest_few(tmp_path: Path, keep: int, wait: bool) -> None:
    with CheckpointFolder(tmp_path, keep=keep) as folder:
        for step in range(0, 60, 10):
            folder.save(step, state(step), wait=wait)
            folder.wait()
            assert folder.steps() == list(range(0, step + 1, 10))[-keep:]
            assert newest(folder) == step


def test_old_ones_go_only_when_the_new_one_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, state(1))
    calls: list[str] = []

    def noted(module: Any, name: str, kind: Callable[..., str]) -> None:
        real = getattr(module, name)

        def call(*args: Any) -> Any:
            calls.append(kind(*args))
            return real(*args)

        monkeypatch.setattr(module, name, call)

    noted(
        os,
        "fsync",
        lambda fd: "sync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else f"sync {os.fstat(fd).st_size > 500}",
    )
    noted(os, "replace", lambda *_: "rename")
    noted(os, "unlink", lambda path: "remove" if path.endswith(".pt") else path)
    folder.save(2, state(2))
    assert calls == ["sync True", "rename", "sync folder", "remove"]


def test_a_step_is_replaced(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path) as folder:
        for step in (1, 2, 3):
            folder.save(step, state(step))
        folder.save(3, {"again": True})
        assert folder.steps() == [1, 2, 3]
        assert len(list(tmp_path.iterdir())) == 3
        assert folder.newest() == (3, {"again": True})
        folder.save(3, {"again": True})  # the same bytes: the same name
        assert folder.newest() == (3, {"again": True})


def test_of_two_files_of_a_step_the_later_written_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between the rename and the removal leaves two."""
    for first, second in (("x", "y"), ("y", "x")):
        where = tmp_path / first
        folder = CheckpointFolder(where, keep=2)
        folder.save(1, state(1))
        folder.save(5, {"a": first})
        with monkeypatch.context() as patch:
            patch.setattr(folder, "_prune", lambda *_: None)
            folder.save(5, {"a": second})
        written = list(where.glob("step-000000005-*"))
        assert len(written) == 2
        for path in written:
            at = 1_000_000_000 + (torch.load(path)["a"] == second)
            os.utime(path, (at, at))
        assert folder.steps() == [1, 5]
        assert folder.newest() == (5, {"a": second})
        folder.save(6, state(6))
        assert folder.steps() == [5, 6]
        (left,) = where.glob("step-000000005-*")
        assert torch.load(left) == {"a": second}


def test_torn_at_each_tenth(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step))
    path = files(tmp_path)[2]
    whole = path.read_bytes()
    for tenth in range(10):
        path.write_bytes(whole[: len(whole) * tenth // 10])
        with pytest.warns(
            RuntimeWarning, match=f"{re.escape(str(path))} is damaged and skipped: its .* checksum"
        ) as said:
            assert newest(folder) == 1
        assert len(said) == 1
    for longer in (whole + b"\0", whole * 2):
        path.write_bytes(longer)
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert newest(folder) == 1
    path.write_bytes(whole)
    assert newest(folder) == 2


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step))
    path = files(tmp_path)[2]
    whole = path.read_bytes()
    drawn = random.Random(3)
    for at in [0, len(whole) - 1, *(drawn.randrange(len(whole)) for _ in range(150))]:
        changed = bytearray(whole)
        changed[at] ^= 1 << drawn.randrange(8)
        path.write_bytes(changed)
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert newest(folder) == 1


def test_all_damaged(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step))
    for path in files(tmp_path).values():
        path.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="damaged") as said:
        assert folder.newest() is None
    assert len(said) == 2


def test_what_the_disk_lost_is_skipped_but_not_what_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, state(step))
    real, code = LocalFiles.open, errno.EIO

    def refuse(files: Any, name: str) -> Any:
        if "-000000002-" in name:
            raise OSError(code, os.strerror(code), name)
        return real(files, name)

    monkeypatch.setattr(LocalFiles, "open", refuse)
    with pytest.warns(RuntimeWarning, match="skipped: Input/output error"):
        assert newest(folder) == 1
    code = errno.EACCES
    with pytest.raises(SystemFailure, match=r"step-000000002-.* can't be read: Permission denied"):
        folder.newest()
    code = errno.ENOENT  # another process has just removed it
    assert newest(folder) == 1


def test_whole_but_not_loadable_is_an_error(tmp_path: Path) -> None:
    """It says more than going back silently to an older one."""
    import hashlib

    folder = CheckpointFolder(tmp_path)
    folder.save(1, state(1))
    buffer = io.BytesIO()
    torch.save({"code": print}, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()[:32]
    (tmp_path / f"step-000000002-{digest}.pt").write_bytes(buffer.getvalue())
    with pytest.raises(SystemFailure, match=r"is whole, but torch .* can't load it"):
        folder.newest()


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=2) as folder:
        for step in (100, 120, 140):
            folder.save(step, state(step))
        files(tmp_path)[140].write_bytes(b"torn")
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert newest(folder) == 120
        folder.save(130, state(130))  # below the damaged one, which is no reason to warn
        assert folder.steps() == [120, 130, 140]
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert newest(folder) == 130
        folder.save(140, state(140))  # replaces it
        assert folder.steps() == [130, 140]
        assert newest(folder) == 140
        assert len(list(tmp_path.iterdir())) == 2


def test_the_one_just_saved_stays_among_later_steps(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path, keep=1).save(900, state(900))
    for keep in (3, 1):
        folder = CheckpointFolder(tmp_path, keep=keep)
        if keep == 3:
            with pytest.warns(RuntimeWarning, match="step 10 is in .* with one of step 900, which stays the newest"):
                folder.save(10, state(10))
            folder.save(20, state(20))  # said once
            assert folder.steps() == [10, 20, 900]
        else:
            folder.save(30, state(30))
            assert folder.steps() == [30]


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    foreign = [
        "notes.txt", "step-12.pt", "step-000000001-0123.pt", f"step-0000000001-{'0' * 32}.pt", f"step-000000001-{'A' * 32}.pt",
        f"other-000000001-{'0' * 32}.pt", f"step-000000001-{'0' * 32}.pt.bak", f"xstep-000000001-{'0' * 32}.pt",
        f"step-00000001x-{'0' * 32}.pt", ".step-x.tmp", f".other-1-{'0' * 16}.tmp", f"step-000000001-{'0' * 32}.pt\n",
    ]  # fmt: skip
    for name in foreign:
        (tmp_path / name).write_text("mine")
    (tmp_path / f"step-000000099-{'0' * 32}.pt").mkdir()
    with CheckpointFolder(tmp_path, keep=1) as folder:
        assert folder.newest() is None
        assert folder.steps() == []
        for step in (1, 2, 3):
            folder.save(step, state(step))
        assert newest(folder) == 3
        assert folder.steps() == [3]
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)
    assert len(list(tmp_path.iterdir())) == len(foreign) + 2


def test_names_of_several_processes_in_one_folder(tmp_path: Path) -> None:
    folders = [CheckpointFolder(tmp_path, keep=1, name=name) for name in ("rank0", "rank0-1", "rank1")]
    for step in (1, 2):
        for folder in folders:
            folder.save(step, state(step))
    assert [folder.steps() for folder in folders] == [[2], [2], [2]]
    assert len(list(tmp_path.iterdir())) == 3


def test_what_killed_processes_left_is_removed_and_the_rest_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f".step-{os.getpid()}-{'0' * 16}.tmp"  # this process's id: a container that was started again
    left.write_bytes(b"half")
    under_way, go_on = threading.Event(), threading.Event()
    folder = CheckpointFolder(tmp_path)
    assert not left.exists()
    real = os.replace

    def slow(*args: Any) -> None:
        under_way.set()
        assert go_on.wait(60)
        real(*args)

    monkeypatch.setattr(os, "replace", slow)
    folder.save(1, state(1), wait=False)
    assert under_way.wait(60)
    (name,) = temporary(tmp_path)
    assert name.startswith(f".step-{os.getpid()}-")
    CheckpointFolder(tmp_path)
    assert temporary(tmp_path) == [name]
    go_on.set()
    folder.wait()
    assert temporary(tmp_path) == []
    assert newest(folder) == 1


# Errors


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
    with pytest.raises(ConfigError, match="step="):
        CheckpointFolder(tmp_path).save(step, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", [3, None, b"bytes", ""])
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


# wait=False


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
