"""CheckpointFolder: what is kept, and what is found after damage."""

from __future__ import annotations

import errno
import io
import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from checkpoint_rig import files, newest, state, temporary  # noqa: E402

from ftcomm.errors import SystemFailure  # noqa: E402
from ftcomm.recovery import CheckpointFolder  # noqa: E402
from ftcomm.recovery.checkpoint_files.files import LocalFiles  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")


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
