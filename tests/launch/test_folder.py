"""The run folder takes what killed workers leave, and keeps nothing of dead ftruns."""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch.running import Start

from ftcomm.errors import ConfigError
from ftcomm.events import EventFile
from ftcomm.launch.folder import Event, RunFolder, parse_line, read_events, remove_abandoned


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
        b'{"time": NaN, "event": "x"}',
        b'{"time": 1' + b"0" * 400 + b', "event": "x"}',
        b'{"time": 1, "event": "x", "rank": "2"}',
        b'{"time": 1, "event": "x", "rank": 2, "incarnation": []}',
        b'{"time": 1, "event": "x", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
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


def test_a_look_whether_events_are_lost_is_no_event(tmp_path: Path) -> None:
    """It wakes nobody: ftrun looks each time it is woken. What a worker writes does."""
    folder = RunFolder(str(tmp_path))
    folder.begin([0], 0, 1)
    folder.new_events()
    assert not folder.loses_events()
    assert not select.select([folder.fd], [], [], 0)[0]
    (tmp_path / "events-0-0.jsonl").write_text('{"time": 1.0, "event": "step", "rank": 0, "incarnation": 0}\n')
    assert select.select([folder.fd], [], [], 0)[0]
    folder.close()


def test_what_cannot_be_read_is_read_later(tmp_path: Path) -> None:
    """No descriptor is left for it. What is no file is never read."""
    folder = RunFolder(str(tmp_path))
    folder.begin([0, 1], node=0, nodes=1)
    (tmp_path / "events-0-0.jsonl").write_text('{"time": 1, "event": "a"}\n')
    (tmp_path / "events-1-0.jsonl").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(folder.fd)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        assert folder.new_events() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [e["event"] for e in folder.new_events()] == ["a"]
    folder.close()


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


def test_names_that_are_no_ftruns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may make them in the folder for temporary files, and that may be one that can't be listed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "ftrun-99999999999-x").mkdir()
    (tmp_path / f"ftrun-{'9' * 30}-x").mkdir()
    remove_abandoned()
    RunFolder(None).close()
    assert len(list(tmp_path.iterdir())) == 2

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    RunFolder(None).close()


def test_one_that_is_held_by_a_process_that_is_not_seen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers have process numbers of their own, and may share a folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = RunFolder(None)
    elsewhere = folder.path.rename(tmp_path / f"ftrun-{ended.pid}-abc")
    remove_abandoned()
    assert elsewhere.exists()
    folder.close()
    remove_abandoned()
    assert not elsewhere.exists()


def test_what_cannot_be_watched_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one descriptor left, for the folder, and none for its watch."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))
    try:
        with pytest.raises(OSError, match="max_user_instances"):
            RunFolder(None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert os.listdir(tmp_path) == []


def test_what_has_been_read_takes_no_room_where_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder(None)
    folder.begin([0], node=0, nodes=1)
    line = json.dumps({"time": 1, "event": "step", "text": "x" * 1000}) + "\n"
    path = folder.path / "events-0-0.jsonl"
    read = 0
    for _ in range(4):
        with open(path, "a") as file:
            file.write(line * 1000)
        read += len(folder.new_events())
    assert read == 4000
    assert path.stat().st_size == 4000 * len(line)
    assert path.stat().st_blocks * 512 < 1500 * len(line)
    folder.close()


def test_events_are_merged_by_time(tmp_path: Path) -> None:
    """Threads of a worker write in turn, and what one has seen may be written after what another has seen later."""
    folder = RunFolder(str(tmp_path))
    folder.begin([0, 1], node=0, nodes=1)
    for rank in (0, 1):
        times = [n ^ 255 for n in range(rank, 8960, 2)]
        lines = (json.dumps({"time": time, "event": "step", "rank": rank}) for time in times)
        (tmp_path / f"events-{rank}-0.jsonl").write_text("\n".join(lines) + "\n")
    folder.log("job")
    heard: list[Event] = []
    merged = folder.merge(heard.append)
    folder.close()
    assert merged is not None
    assert heard == read_events(merged)
    found = [event["time"] for event in heard]
    assert found[:-1] == list(range(8960))
    assert not list(tmp_path.glob("*.part"))


def test_another_ftrun_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first, second = RunFolder(str(tmp_path)), RunFolder(str(tmp_path))
    first.begin([0, 1], node=0, nodes=1)
    (tmp_path / "events-0-0.jsonl").write_text('{"time": 1, "event": "step"}\n')
    with pytest.raises(ConfigError, match="another ftrun writes into the run folder"):
        second.begin([0, 1], node=0, nodes=1)
    assert len(first.new_events()) == 1
    first.close()
    second.begin([0, 1], node=0, nodes=1)
    second.close()


@pytest.mark.parametrize("option", ["--events", "--pair-log", "FTCOMM_LOG_SPILL"])
def test_a_folder_that_cannot_be_made(start: Start, tmp_path: Path, option: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    flags, env = ((), {option: str(file)}) if option.startswith("FTCOMM") else ((option, str(file)), {})
    code, _, err = start("", "--policy", "replay", *flags, **env).finish()
    assert code == 2
    assert f"{file} can't be made: there is a file of that name; give another with {option}" in err


def test_a_full_disk_costs_events_and_nothing_else(tmp_path: Path) -> None:
    """With a limit on files, which the kernel keeps to as to the end of a disk: the last line is written in part."""
    script = f"""
        import resource
        from ftcomm.events import EventFile
        file = EventFile([{str(tmp_path)!r}], 0, 0)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        for step in range(5):
            file.write({{"event": "step", "step": step}})
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        file.write({{"event": "step", "step": 9}})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the run goes on, but events are lost") == 1
    lines = (tmp_path / "events-0-0.jsonl").read_bytes().splitlines()
    read = [event["step"] for line in lines if (event := parse_line(line)) is not None]
    assert read[-1] == 9
    assert read[:-1] == list(range(len(read) - 1))
    assert len(lines) == len(read) + 1


def test_where_no_file_can_be_made_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A disk without inodes looks like this: else no replacement could start there."""
    (tmp_path / "file").write_text("")
    events = EventFile([str(tmp_path / "file" / "run")], 0, 1)
    events.write({"event": "step"})
    events.close()
    assert capsys.readouterr().err.count("Not a directory; the run goes on, but events are lost") == 1


def test_a_folder_that_the_script_names_takes_nothing_from_ftrun(start: Start, tmp_path: Path) -> None:
    run = start(
        """
        import os, ftcomm
        ftcomm.init(options=ftcomm.Options(events=os.environ["WORK"] + "/own")).leave()
        """,
        "--events",
        str(tmp_path / "run"),
    )
    code, _, err = run.finish()
    assert code == 0, err
    own = read_events(tmp_path / "own" / "events-0-0.jsonl")
    assert "started" in [event["event"] for event in own]
    assert own == read_events(tmp_path / "run" / "events-0-0.jsonl")
