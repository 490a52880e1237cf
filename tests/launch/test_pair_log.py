"""The pair log's folder goes with its ftrun, and never before."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launch.running import Start, clean_environment, wait_gone

from ftcomm.cli import main
from ftcomm.launch import pair_log
from ftcomm.launch.pair_log import PairLog, remove_abandoned_logs, start_time

REPLAY = ("--policy", "replay")
SHOW = """
import os, signal, sys
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
say(os.environ["FTCOMM_LOG_DIR"])
"""


def test_made_for_the_workers_and_removed_at_the_end(start: Start) -> None:
    run = start(
        SHOW
        + """
import json, stat
folder = os.environ["FTCOMM_LOG_DIR"]
owner = json.load(open(f"{folder}/owner"))
say(stat.S_IMODE(os.stat(folder).st_mode), os.environ["FTCOMM_LOG_OWNER"], owner["pid"] == os.getppid())
say(owner["job"] == os.environ["FTCOMM_JOB"])
open(f"{folder}/records", "w").close()
if os.environ["FTCOMM_INCARNATION"] == "0": os.kill(os.getpid(), signal.SIGKILL)
""",
        *REPLAY,
    )
    code, out, err = run.finish()
    assert code == 0, err
    first, replacement = out.splitlines()[:3], out.splitlines()[3:]
    assert first == replacement
    assert first[1:] == [f"{0o700} launcher True", "True"]
    folder = Path(first[0])
    assert folder.parent == Path("/dev/shm")
    assert folder.name.startswith(f"ftcomm-log-{os.getuid()}-{run.process.pid}-")
    assert not folder.exists()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_removed_after_a_signal(start: Start, tmp_path: Path, sig: signal.Signals) -> None:
    run = start(SHOW + "signal.pause()", *REPLAY, "--pair-log", str(tmp_path / "logs"))
    (folder,) = run.read_lines(1)
    assert Path(folder).parent == tmp_path / "logs"
    run.send(sig)
    code, _, err = run.finish()
    assert code == 128 + sig, err
    assert list((tmp_path / "logs").iterdir()) == []


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_removed_after_a_signal_that_comes_when_it_is_made(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sig: signal.Signals
) -> None:
    whole = pair_log._Owned.__init__

    def init(self: pair_log._Owned, path: Path, notes: dict[str, str], option: str) -> None:
        whole(self, path, notes, option)
        os.kill(os.getpid(), sig)

    monkeypatch.setattr(pair_log._Owned, "__init__", init)  # ftrun is forked from here
    code, out, err = start(SHOW, *REPLAY, "--pair-log", str(tmp_path / "logs")).finish()
    assert (code, out) == (128 + sig, ""), err
    assert list((tmp_path / "logs").iterdir()) == []


def test_killed_while_it_is_removed(tmp_path: Path) -> None:
    """At the worst moment: its owner's file has gone. In which order a folder's files are found is the file system's."""
    script = f"""
import os, signal
from ftcomm.launch.pair_log import PairLog
log = PairLog({str(tmp_path)!r})
for name in "abcdefgh": (log.path / name).write_text("x")
unlink = os.unlink
def once(path, **how):
    unlink(path, **how)
    if os.path.basename(path) == "owner": os.kill(os.getpid(), signal.SIGKILL)
os.unlink = once
log.remove()
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))  # else it may be one that is being made just now
    remove_abandoned_logs(tmp_path)
    assert not left.exists()


def test_removed_after_a_failure(start: Start, tmp_path: Path) -> None:
    run = start(SHOW + "sys.exit(3)", *REPLAY, "--max-restarts", "0", FTCOMM_LOG_DIR=str(tmp_path / "logs"))
    code, out, err = run.finish()
    assert code == 1, err
    assert Path(out.strip()).parent == tmp_path / "logs"
    assert list((tmp_path / "logs").iterdir()) == []


def test_after_sigkill_of_ftrun_the_next_one_removes_it(start: Start, tmp_path: Path) -> None:
    flags = (*REPLAY, "--pair-log", str(tmp_path))
    pause = SHOW + "say(os.getpid()); signal.pause()"
    killed, living = start(pause, *flags), start(pause, *flags)
    left, worker = killed.read_lines(2)
    used, _ = living.read_lines(2)
    gone = os.pidfd_open(int(worker))
    killed.process.kill()
    killed.process.wait()
    wait_gone([gone])
    assert Path(left).exists()
    code, _, err = start(SHOW, *flags).finish()
    assert code == 0, err
    assert not Path(left).exists()
    assert Path(used).exists()
    living.send(signal.SIGINT)
    assert living.finish()[0] == 130
    assert not Path(used).exists()


def test_clean_says_what_it_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = PairLog(str(tmp_path))
    left = left_behind(tmp_path)
    assert main(["clean", str(tmp_path)]) == 0
    assert f"removed {left}" in capsys.readouterr().out.splitlines()
    assert not left.exists()
    assert used.path.exists()
    left = left_behind(tmp_path)
    monkeypatch.setenv("FTCOMM_LOG_DIR", str(tmp_path))
    assert main(["clean"]) == 0
    assert not left.exists()
    used.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_was_spilled_goes_with_the_log(start: Start, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    run = start(
        """
import os, signal
log, spill = os.environ["FTCOMM_LOG_DIR"], os.environ["FTCOMM_LOG_SPILL"]
host = f"{spill}/{os.path.basename(log)}/0123456789abcdef"  # as the native side makes it
os.makedirs(host, 0o700)
open(f"{host}/segment", "w").close()
""",
        *REPLAY,
        FTCOMM_LOG_SPILL=str(spill),
    )
    (tmp_path / "spill/data").mkdir(parents=True)
    code, _, err = run.finish()
    assert code == 0, err
    assert [entry.name for entry in spill.iterdir()] == ["data"]


def test_what_a_killed_ftrun_has_spilled_goes_with_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs, spill = tmp_path / "logs", tmp_path / "spill"
    used = PairLog(str(logs), str(spill))
    left = left_behind(logs, spill)
    (spill / left.name / "0123456789abcdef").mkdir()
    assert main(["clean", str(logs)]) == 0
    assert set(capsys.readouterr().out.splitlines()) >= {f"removed {left}", f"removed {spill / left.name}"}
    assert [entry.name for entry in spill.iterdir()] == [used.path.name]
    used.remove()
    assert [*logs.iterdir(), *spill.iterdir()] == []


def test_what_was_spilled_may_have_outlived_its_log(tmp_path: Path) -> None:
    """The log was in memory, and the host has started anew. Another host's is not looked at: its locks may not be seen here."""
    spill = tmp_path / "spill"
    left = spill / left_behind(tmp_path / "logs", spill).name
    rewrite(left, boot="another")
    foreign = left.with_name(f"{left.name}x")
    shutil.copytree(left, foreign)
    rewrite(foreign, node="another")
    PairLog(None, str(spill)).remove()
    assert list(spill.iterdir()) == [foreign]


@pytest.mark.parametrize("proof", ["lock", "process"])
def test_either_proof_of_life_protects_what_was_spilled(tmp_path: Path, proof: str) -> None:
    """Also where the log's owner seems to be dead."""
    log = PairLog(str(tmp_path / "logs"), str(tmp_path / "spill"))
    lose_proof(log, 0, "lock")
    lose_proof(log, 0, "process")
    lose_proof(log, 1, "process" if proof == "lock" else "lock")
    remove_abandoned_logs(tmp_path / "logs")
    assert not log.path.exists()
    assert log.folders[1].path.exists()
    log.remove()


def left_behind(place: Path, spill: Path | None = None) -> Path:
    """A log whose owner was killed."""
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; from ftcomm.launch.pair_log import PairLog\n"
            "print(PairLog(*sys.argv[1:]).path, flush=True); os.kill(os.getpid(), 9)",
            str(place),
            *([str(spill)] if spill else []),
        ],
        capture_output=True,
        check=False,
        text=True,
        env=clean_environment(),
    )
    return Path(made.stdout.strip())


@pytest.mark.parametrize("proof", ["lock", "process"])
def test_either_proof_of_life_protects(tmp_path: Path, proof: str) -> None:
    """The lock one of another pid namespace, the process one in a file system without locks."""
    log = PairLog(str(tmp_path))
    lose_proof(log, 0, "process" if proof == "lock" else "lock")
    remove_abandoned_logs(tmp_path)
    assert log.path.exists()
    log.remove()


def lose_proof(log: PairLog, which: int, proof: str) -> None:
    folder = log.folders[which]
    if proof == "process":
        rewrite(folder.path, pid=2**22 + 1)
    else:
        os.close(os.dup2(os.open(os.devnull, os.O_RDONLY), folder.fd))
        folder.fd = os.open(folder.path / "owner", os.O_RDWR)


def rewrite(folder: Path, **changed: object) -> None:
    owner = folder / "owner"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), **changed}))


@pytest.mark.parametrize("changed", [{"boot": "another"}, {"start": 1}])
def test_a_pid_that_another_process_has_by_now(tmp_path: Path, changed: dict[str, object]) -> None:
    left = left_behind(tmp_path)
    here = {"pid": os.getpid(), "start": start_time(os.getpid())}
    rewrite(left, **here)
    remove_abandoned_logs(tmp_path)
    assert left.exists()
    rewrite(left, **{**here, **changed})
    remove_abandoned_logs(tmp_path)
    assert not left.exists()


def test_what_is_not_such_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "ftcomm-log-mine").mkdir()
    (tmp_path / "data").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    os.utime(target, (1, 1))
    (tmp_path / f"ftcomm-log-{os.getuid()}-{2**22 + 1}-abc").symlink_to(target)
    young = tmp_path / f"ftcomm-log-{os.getuid()}-{2**22 + 1}-young"
    young.mkdir()
    old = tmp_path / f"ftcomm-log-{os.getuid()}-{2**22 + 1}-old"
    old.mkdir()
    foreign = tmp_path / f"ftcomm-log-{os.getuid()}-{2**22 + 1}-foreign"  # without an owner's file, and in use
    foreign.mkdir()
    (foreign / "records").touch()
    for path in (old, foreign):
        os.utime(path, (1, 1))
    remove_abandoned_logs(tmp_path)
    assert not old.exists()
    assert len(list(tmp_path.iterdir())) == 6


def test_a_folder_that_cannot_be_made_is_told(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = start(SHOW, *REPLAY, "--pair-log", str(tmp_path / "file")).finish()
    assert (code, out) == (2, "")
    assert "ftrun: " in err
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)


def test_where_the_kernel_tells_no_boot_id(tmp_path: Path) -> None:
    """As in a sandbox that hides it. What a killed ftrun has left is removed all the same."""
    masked = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    hide = 'mount -t tmpfs none /proc/sys/kernel/random && exec "$@"'
    if subprocess.run([*masked, hide, "sh", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    (tmp_path / "script.py").write_text(
        "import os; print(os.environ['FTCOMM_LOG_DIR'], flush=True)\n"
        "if os.environ['END'] == 'kill': os.kill(os.getppid(), 9); os.read(os.pipe()[0], 1)\n"
    )
    ftrun = [
        sys.executable,
        "-m",
        "ftcomm.launch.cli",
        *REPLAY,
        "--pair-log",
        str(tmp_path),
        str(tmp_path / "script.py"),
    ]
    for end, code in (("kill", -signal.SIGKILL), ("return", 0)):
        run = subprocess.run(
            [*masked, hide, "sh", *ftrun],
            env=clean_environment(END=end, TMPDIR=str(tmp_path)),
            check=False,
            capture_output=True,
            text=True,
        )
        assert run.returncode == code, run.stderr
        assert Path(run.stdout.strip()).exists() == (end == "kill")
    assert not list(tmp_path.glob("ftcomm-log-*"))


def test_pair_log_is_for_replay(start: Start, tmp_path: Path) -> None:
    code, out, err = start(SHOW, "--pair-log", str(tmp_path)).finish()
    assert (code, out) == (2, "")
    assert "--pair-log is for --policy replay" in err


def test_no_room_for_the_owner_says_where_else(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as a full disk
    try:
        with pytest.raises(OSError, match="give it another place \\(--pair-log\\)"):
            PairLog(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
