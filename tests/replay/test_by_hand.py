"""A job that is started by hand, dies as a whole, and goes on out of its logs in another start, as docs/replay.md says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ports import free_port

from ftcomm.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "ring_replay.py"
SIZE = 2


def start(log: Path, again: int, faults: str = "", size: int = SIZE, **more: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank. ``again``: how often the job was started before; ``more``: variables."""
    port = free_port()
    settings = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "STEPS": "30",
        "FTCOMM_POLICY": "replay", "FTCOMM_JOB": "by-hand", "FTCOMM_LOG_OWNER": "user", "FTCOMM_LOG_DIR": str(log),
        "FTCOMM_DURABILITY": "host", "FTCOMM_GENERATION": str(again), "FTCOMM_INCARNATION": str(again),
        "FTCOMM_FAULTS": faults,
    }  # fmt: skip
    base = {name: value for name, value in os.environ.items() if not name.startswith("FTCOMM_")}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, EXAMPLE],
            env=base | settings | more | {"RANK": str(rank)},
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        ended = [(*process.communicate(timeout=100), process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out, err) for out, err, process in ended]


def digests(ended: list[tuple[int, str, str]], again: int) -> list[str]:
    assert [code for code, _, _ in ended] == [0] * SIZE, ended
    said = [f"rank {rank}, process {again}: " for rank in range(SIZE)]
    assert all(out.startswith(words) for (_, out, _), words in zip(ended, said, strict=True)), ended
    return [out.split()[-1] for _, out, _ in ended]


def test_all_die_and_are_started_again(tmp_path: Path) -> None:
    wanted = digests(start(tmp_path / "undisturbed", 0), 0)
    log = tmp_path / "log"
    faults = ";".join(f"rank={rank}.0,at=channel.receive:20,do=kill" for rank in range(SIZE))
    assert [code for code, _, _ in start(log, 0, faults)] == [-signal.SIGKILL] * SIZE
    faults = ";".join(f"rank={rank}.1,at=channel.receive:27,do=kill" for rank in range(SIZE))
    assert [code for code, _, _ in start(log, 1, faults)] == [-signal.SIGKILL] * SIZE
    ended = start(log, 2)
    assert digests(ended, 2) == wanted
    assert list(log.iterdir())  # which is the user's to remove


def test_what_a_killed_job_leaves_in_memory_is_found(tmp_path: Path) -> None:
    """Its name may never come again. (Another test's run may have removed it before.)"""
    name = f"by-hand-{os.getpid()}"
    faults = ";".join(f"rank={rank},at=channel.receive:20,do=kill" for rank in range(SIZE))
    ended = start(
        tmp_path, 0, faults, FTCOMM_JOB=name, FTCOMM_LOG_DIR="", FTCOMM_LOG_OWNER="", FTCOMM_DURABILITY="process"
    )
    assert [code for code, _, _ in ended] == [-signal.SIGKILL] * SIZE, ended
    assert main(["clean"]) == 0
    assert [str(path) for path in Path("/dev/shm").glob("ftcomm-log*/*/job") if name in read(path)] == []


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another test's
        return ""


def test_a_log_dir_stays_its_users(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    digests(start(log, 0, FTCOMM_LOG_OWNER=""), 0)
    assert list(log.iterdir()) == []


def test_a_replacement_of_the_rank_that_hosted_the_store(tmp_path: Path) -> None:
    """It is told so at once, instead of waiting for a store that nobody else would start."""
    (code, _, err), *_ = start(tmp_path, 0, size=1, FTCOMM_INCARNATION="1", WORLD_SIZE="2")
    assert code == 1
    assert "This process replaces rank 0, and the store that rank 0 hosted has ended with it" in err
    assert "FTCOMM_GENERATION" in err
