"""The run folder takes what killed workers leave, and keeps nothing of dead ftruns."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ftcomm.launch.folder import RunFolder, parse_line, remove_abandoned


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"event": "step"}',
        b'{"time": 1}',
        b'{"time": true, "event": "x"}',
        b'{"time": 1, "event": 2}',
        b"\xff\xfe",
        b'{"time": 1, "event": "' + b"x" * (1 << 20) + b'"}',
    ],
)
def test_what_is_no_event(line: bytes) -> None:
    assert parse_line(line) is None


def test_a_worker_that_writes_wakes_the_reader(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.begin([0, 1], node=0, nodes=1)
    folder.new_events()
    assert select.select([folder.fd], [], [], 0)[0] == []
    with open(tmp_path / "events-1-0.jsonl", "a") as file:
        file.write('{"time": 2, "event": "a"}\n{"time": 3, "ev')
    assert select.select([folder.fd], [], [], 10)[0] == [folder.fd]
    assert [e["event"] for e in folder.new_events()] == ["a"]
    with open(tmp_path / "events-1-0.jsonl", "a") as file:
        file.write('ent": "b"}\n')
    (tmp_path / "events-5-0.jsonl").write_text('{"time": 1, "event": "of another node"}\n')
    assert [e["event"] for e in folder.new_events()] == ["b"]
    folder.close()
    assert tmp_path.exists()


def test_folders_of_dead_ftruns_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned, used, foreign = (tmp_path / f"ftrun-{n}-abc" for n in (ended.pid, os.getpid(), "x"))
    for path in (abandoned, used, foreign):
        path.mkdir()
    removed: list[str] = []
    remove_abandoned(removed.append)
    assert removed == [str(abandoned)]
    assert used.exists()
    assert foreign.exists()
