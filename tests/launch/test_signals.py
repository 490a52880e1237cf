"""SIGTERM is a notice, Ctrl-C ends, and SIGKILL of ftrun leaves nobody behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch.running import Start, clean_environment, wait_gone

from ftcomm.launch import preempt, supervisor, worker, workers

pytestmark = pytest.mark.execs_workers

NOTICED = """
import os, signal
from ftcomm.launch import preempt
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
assert preempt.install() and not preempt.requested()
os.write(1, b"ready\\n")
os.read(read, 1)
assert preempt.requested()
os.write(1, b"finished the step\\n")
"""

STUBBORN = """
import os, signal
for name in ("SIGTERM", "SIGINT"):
    signal.signal(signal.Signals[name], signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())
while True: signal.pause()
"""

ONCE = """
import os, signal
first = os.environ["FTCOMM_INCARNATION"] == "0"
os.write(1, b"%d\\n" % (os.getpid() if first else 1))
if first: signal.pause()
"""

PATIENT = """
import os, signal
os.write(1, b"%d\\n" % os.getpid())
while True: signal.pause()
"""

WHEN_TOLD = """
open(os.environ["WORK"] + "/go" + os.environ["RANK"]).read()
os.write(1, b"done\\n")
"""


@pytest.mark.parametrize("policy", ["lossy", "replay"])
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_signal_while_the_store_does_not_answer(start: Start, tmp_path: Path, policy: str, backend: str) -> None:
    """torch's C++ code waits for it, and runs no Python handler. There is no worker yet: ftrun cleans up and ends by itself."""
    (tmp_path / "log").mkdir()
    log = ("--pair-log", str(tmp_path / "log")) if policy == "replay" else ()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = str(nobody.getsockname()[1])
        place = {
            "static": ("--master-addr", "127.0.0.1", "--master-port", port, "--node-rank", "1"),
            "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "is_host=0"),
        }[backend]
        run = start(PATIENT, "--nnodes", "2", "--policy", policy, *log, *place)
        with nobody.accept()[0]:
            run.send(signal.SIGTERM)
            code, _, err = run.finish()
    assert (code, err.count("interrupted by SIGTERM")) == (143, 1), err
    assert not list((tmp_path / "log").iterdir()), "the pair log's folder"
    assert not list(tmp_path.glob("ftrun-*")), "the run folder"


def test_sigterm_is_forwarded_as_a_notice(start: Start) -> None:
    run = start(NOTICED, "--nproc-per-node", "2")
    run.read_lines(2)
    run.send(signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 143, err
    assert out.count("finished the step") == 2, err
    assert "replacement" not in err


def test_ctrl_c_ends_everything(start: Start) -> None:
    run = start(PATIENT, "--nproc-per-node", "2")
    workers = [os.pidfd_open(int(line)) for line in run.read_lines(2)]
    run.send(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 130, err
    wait_gone(workers)


def test_a_second_signal_ends_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "ONCE", 0.0)
    run = start(STUBBORN, "--nproc-per-node", "2", "--shutdown-timeout", "3000000")
    workers = [os.pidfd_open(int(line)) for line in run.read_lines(2)]
    run.send(signal.SIGTERM)
    run.hear("SIGTERM: the workers finish")
    run.send(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 143, err
    wait_gone(workers)


def test_a_signal_that_comes_twice_in_a_moment_is_one(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`timeout` sends it to its child and to the whole group, for one."""
    monkeypatch.setattr(supervisor, "ONCE", 3600.0)
    for rank in range(2):
        os.mkfifo(tmp_path / f"go{rank}")
    run = start(NOTICED + WHEN_TOLD, "--nproc-per-node", "2")
    run.read_lines(2)
    run.send(signal.SIGTERM)
    run.read_lines(2)
    run.send(signal.SIGTERM)
    for rank in range(2):
        (tmp_path / f"go{rank}").write_text("")
    code, out, err = run.finish()
    assert code == 143, err
    assert out.count("done") == 2, err


def test_what_nohup_has_it_ignore_it_ignores(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go0")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = start("import os" + WHEN_TOLD, "--nproc-per-node", "1")
    signal.signal(signal.SIGHUP, before)
    run.hear("1 workers")
    run.send(signal.SIGHUP)
    (tmp_path / "go0").write_text("")
    code, out, err = run.finish()
    assert (code, out) == (0, "done\n"), err


def test_who_does_not_end_in_time_is_killed(start: Start) -> None:
    run = start(STUBBORN, "--nproc-per-node", "2", "--shutdown-timeout", "1")
    workers = [os.pidfd_open(int(line)) for line in run.read_lines(2)]
    run.send(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 130
    assert "are killed: did not end in time" in err
    wait_gone(workers)


def test_sigkill_of_ftrun_leaves_no_worker(start: Start) -> None:
    run = start(STUBBORN, "--nproc-per-node", "3")
    workers = [os.pidfd_open(int(line)) for line in run.read_lines(3)]
    run.process.kill()
    wait_gone(workers)


def test_a_script_without_join_points_ends_by_sigterm(start: Start) -> None:
    run = start(PATIENT + "\nimport ftcomm.launch.preempt", "--nproc-per-node", "1")
    workers = [os.pidfd_open(int(line)) for line in run.read_lines(1)]
    run.send(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 143, err
    wait_gone(workers)


def test_under_torchrun_a_notice_is_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which passes its own on to one worker after another. Under ftrun there is a notice of which workers are meant."""
    monkeypatch.setattr(preempt, "_requested", True)
    monkeypatch.setattr(preempt, "install", lambda: True)
    assert preempt.told(3) == {3}
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert preempt.told(3) == {0, 1, 2, 3}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # another node's torchrun may be about to start all again
    assert preempt.told(3) == {3}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("FTCOMM_INCARNATION", "0")
    assert preempt.told(3) == {3}
    monkeypatch.setattr(preempt, "_requested", False)
    assert preempt.told(3) == set()


@pytest.mark.parametrize("missed", [1, 99])
def test_a_kill_that_is_not_heard_is_not_the_last(start: Start, monkeypatch: pytest.MonkeyPatch, missed: int) -> None:
    """The process of rank 1 is as one that sleeps in the kernel. Whoever does not die in the end, ftrun ends without it."""
    whole = worker.Worker._strike
    strikes = []

    def strike(self: worker.Worker) -> None:
        if self.local_rank_id == 1:
            strikes.append(0)
            if len(strikes) <= missed:
                return
        whole(self)

    monkeypatch.setattr(worker.Worker, "_strike", strike)  # ftrun is forked from here
    for module in (worker, workers):
        monkeypatch.setattr(module, "AGAIN", 0.2)
    monkeypatch.setattr(supervisor, "ONCE", 0.0)  # the second signal is another one, however soon it comes
    run = start(STUBBORN, "--nproc-per-node", "2")
    pids = [int(line) for line in run.read_lines(2)]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    run.send(signal.SIGTERM)
    run.hear("SIGTERM: the workers finish")  # two signals at once may be one
    run.send(signal.SIGTERM)
    code, _, err = run.finish()
    assert code != 0
    assert "is still there after SIGKILL (State S" in err
    assert ("ftrun ends without it" in err) == (missed == 99)
    wait_gone(pidfds)  # by PDEATHSIG at the latest


def test_ftrun_hears_of_deaths_when_its_parent_has_blocked_the_signal(start: Start) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        run = start(ONCE, "--nproc-per-node", "1", "--max-restarts", "1")
        os.kill(int(run.read_lines(1)[0]), signal.SIGKILL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code, _, err = run.finish()
    assert code == 0, err


def test_nobody_reads_what_ftrun_says(start: Start) -> None:
    """Its narration ends; the run does not."""
    read, write = os.pipe()
    run = start(ONCE, "--nproc-per-node", "1", "--max-restarts", "1", stderr=write)
    os.close(write)
    pid = int(run.read_lines(1)[0])
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    assert run.read_lines(1) == ["1"]
    assert run.finish()[0] == 0


def test_nobody_ever_reads_what_it_says(tmp_path: Path) -> None:
    """It is started without a stderr, as some daemons start their children."""
    script = tmp_path / "script.py"
    script.write_text("import os; os.write(1, b'started'); os.write(2, b'heard')")
    command = [sys.executable, "-m", "ftcomm.launch.cli", str(script)]
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    run = subprocess.run(closed, env=clean_environment(TMPDIR=str(tmp_path)), stdout=subprocess.PIPE, check=False)
    assert (run.returncode, run.stdout) == (0, b"started")
