"""Only the worker that failed is replaced."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launch.running import Start, wait_gone

from ftcomm.launch import retries
from ftcomm.launch.workers import Slot, WorkerContext

HELLO = """
import os, signal, sys
rank, incarnation = int(os.environ["RANK"]), int(os.environ["FTCOMM_INCARNATION"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
ONE_DIES = (
    HELLO
    + """
say(rank, incarnation)
if rank == 1 and incarnation == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


def test_siblings_of_a_killed_worker_go_on(start: Start, tmp_path: Path) -> None:
    for rank in (0, 2):
        os.mkfifo(tmp_path / f"fifo{rank}")
    run = start(
        ONE_DIES
        + """
if rank == 1:
    for other in (0, 2):
        with open(f"{os.environ['WORK']}/fifo{other}", "w") as fifo: fifo.write("go")
else:
    with open(f"{os.environ['WORK']}/fifo{rank}") as fifo: assert fifo.read() == "go"
""",
        "--nproc-per-node",
        "3",
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(out.split("\n")[:-1]) == ["0 0", "1 0", "1 1", "2 0"]
    assert "rank 1 ended: killed by SIGKILL" in err
    assert "slot 1: replacement 1 started" in err


def test_a_replacement_that_the_kernel_refuses_is_tried_again(
    start: Start, tmp_path: Path, no_processes: Callable[[int], None]
) -> None:
    no_processes(2)
    os.mkfifo(tmp_path / "fifo")
    run = start(
        ONE_DIES
        + """
with open(f"{os.environ['WORK']}/fifo", "w" if rank == 1 else "r") as fifo: rank == 1 or fifo.read()
""",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(out.split("\n")[:-1]) == ["0 0", "1 0", "1 1"]
    refused = "slot 1: replacement 1 could not be started ([Errno 11] Resource temporarily unavailable); again in"
    assert [line.partition(refused)[2] for line in err.splitlines() if refused in line] == [" 0.05 s", " 0.1 s"]


def test_in_the_end_it_is_given_up_and_the_others_go_on(
    start: Start, tmp_path: Path, no_processes: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_processes(99)
    monkeypatch.setattr(retries, "TRIES", 2)
    run = start(HELLO + "say(rank, incarnation); rank and sys.exit(3); signal.pause()", "--nproc-per-node", "2")
    said = run.hear("is given up")
    assert "slot 1 is given up: no process could be started" in said[-1], said
    assert "The others run on." in said[-1]
    run.send(signal.SIGINT)
    assert run.finish()[0] != 0


def test_ctrl_c_ends_the_wait_for_processes(start: Start, no_processes: Callable[[int], None]) -> None:
    no_processes(99)
    run = start(HELLO + "rank and sys.exit(3); signal.pause()", "--nproc-per-node", "2")
    run.hear("could not be started")
    run.send(signal.SIGINT)
    code, _, err = run.finish()
    assert code != 0
    assert "did not end in time" not in err


@pytest.mark.parametrize("flags", [(), ("--policy", "replay")], ids=["", "replay"])
def test_events_that_lack_what_they_should_have_are_left_out(
    start: Start, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    run = start(
        HELLO
        + """
import json
with open(f"{os.environ['FTCOMM_EVENTS']}/events-0-0.jsonl", "a") as file:
    for event in (
        {"event": "refused"},
        {"event": "job", "ranks": 5},
        {"event": "exit", "code": 1, "how": 5, "waiting": [], "rank": 0},
        {"event": "started", "joining": False, "world_size": "2", "process": 0, "rank": 0},
        {"event": "started", "log_group": [0]},
        {"event": "joined", "slot": [], "slot_incarnation": {}},
        {"event": "removed", "slot": [], "slot_incarnation": {}},
        {"event": "suspected", "slot": 0, "evidence": "pidfd", "slot_incarnation": [], "rank": 0},
    ):
        file.write(json.dumps({"time": 1, **event}) + "\\n")
say("done")
""",
        "--pair-log" if flags else "--nproc-per-node",
        str(tmp_path) if flags else "1",
        *flags,
    )
    code, out, err = run.finish()
    assert (code, out) == (0, "done\n"), err


def test_ftrun_has_all_descriptors_and_workers_have_the_usual(start: Start) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, limits[1]))
    run = start(
        HELLO
        + """
import resource
say(*(resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in (os.getpid(), os.getppid())))
"""
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    code, out, err = run.finish()
    assert (code, out) == (0, f"{low} {limits[1]}\n"), err


def test_a_worker_that_comes_back_too_often_is_given_up(start: Start) -> None:
    run = start(HELLO + "say(rank, incarnation); sys.exit(3 * rank)", "--nproc-per-node", "2", "--max-restarts", "2")
    code, out, err = run.finish()
    assert code == 1
    assert sorted(out.split("\n")[:-1]) == ["0 0", "1 0", "1 1", "1 2"]
    assert "slot 1 is given up" in err
    assert "rank 1 failed for good: exit code 3" in err


def test_the_others_outlive_a_given_up_slot(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    run = start(
        HELLO
        + """
if rank == 1: sys.exit(1)
with open(f"{os.environ['WORK']}/fifo") as fifo: say("went on", fifo.read())
""",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "0",
    )
    said = run.hear("slot 1 is given up")
    (tmp_path / "fifo").write_text("and ended")
    code, out, err = run.finish()
    assert (code, out) == (1, "went on and ended\n"), [*said, err]


def test_forked_children_of_a_killed_worker_are_swept_away(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    run = start(
        HELLO
        + """
if incarnation == 0:
    child = os.fork()
    if child == 0:
        signal.pause()
    say(child)
    open(f"{os.environ['WORK']}/fifo").read()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    child = os.pidfd_open(int(run.read_lines(1)[0]))
    (tmp_path / "fifo").write_text("go")
    code, _, err = run.finish()
    assert code == 0, err
    wait_gone([child])


def test_a_replacement_that_comes_after_the_end_is_ended(start: Start, tmp_path: Path) -> None:
    """Of a job that speaks ftcomm: the replacement waits for members that are not there any more."""
    os.mkfifo(tmp_path / "fifo")
    run = start(
        HELLO
        + """
import json, time
with open(f"{os.environ['FTCOMM_EVENTS']}/events-{rank}-{incarnation}.jsonl", "a") as file:
    file.write(json.dumps({"time": time.time(), "rank": rank, "incarnation": incarnation, "event": "step"}) + "\\n")
if rank == 1 and incarnation == 0: sys.exit(1)
fifo = f"{os.environ['WORK']}/fifo"
if rank == 0:
    open(fifo).read()
else:
    open(fifo, "w").close()
    signal.pause()
""",
        "--nproc-per-node",
        "2",
    )
    code, _, err = run.finish()
    assert code == 1
    assert err.count("slot 1: the replacement is ended: the others had finished before it came in") == 1


def test_a_replacement_in_a_new_job_of_the_others_is_not_ended(start: Start, tmp_path: Path) -> None:
    """It has come in: not into the job that its predecessor was in, but it is a member."""
    run = start(
        HELLO
        + """
import pathlib, select
import numpy as np
import ftcomm
pid, store = pathlib.Path(os.environ["WORK"], "pid"), f"file://{os.environ['WORK']}/store"
if incarnation == 0:
    comm = ftcomm.init(rank, 2, store, ftcomm.Options(policy="raise"), job="first")
    comm.barrier()
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    pid.write_text(str(os.getpid()))
    try: comm.barrier()
    except (ftcomm.PeerFailure, ftcomm.Revoked): comm.job.close()
comm = ftcomm.init(rank, 2, store, ftcomm.Options(policy="raise"), job="second", incarnation=0)
comm.barrier()
other = os.pidfd_open(int(pid.read_text())) if rank == 1 else None
comm.leave()
if rank == 1:  # ftrun sees the other's end, and says so in the run folder
    select.select([other], [], [])
    ftrun = pathlib.Path(os.environ["FTCOMM_EVENTS"], "ftrun-0.jsonl")
    while '"exit", "source": "ftrun", "rank": 0' not in ftrun.read_text(): pass
    for _ in range(3): ftcomm.init(0, 1, store, ftcomm.Options(policy="raise"), job=f"alone-{_}").leave()
say("end of", rank, incarnation)
""",
        "--nproc-per-node",
        "2",
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(out.split("\n")[:-1]) == ["end of 0 0", "end of 1 1"]


def test_under_raise_a_replacement_is_refused(start: Start, tmp_path: Path) -> None:
    """The others have gone on without its slot. Alone it would compute with its own data, and call that a success."""
    os.mkfifo(tmp_path / "fifo")
    run = start(
        HELLO
        + """
import ftcomm
comm = ftcomm.init()
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
try: comm.barrier()
except ftcomm.PeerFailure: comm = comm.shrink()
if rank == 0:
    with open(f"{os.environ['WORK']}/fifo") as fifo: fifo.read()
comm.barrier()
say(rank, incarnation, comm.size)
""",
        "--nproc-per-node",
        "3",
    )
    said = "\n".join(run.hear("is given up"))
    (tmp_path / "fifo").write_text("")
    code, out, err = run.finish()
    assert (
        "slot 1 is given up: the policy raise takes no replacements (--policy lossy and replay do). The others run on."
        in said
    )
    assert said.count("This process replaces a dead rank 1 of job") == 1
    assert (code, sorted(out.split("\n")[:-1])) == (1, ["0 0 2", "2 0 2"]), err
    assert "rank 1 failed for good: killed by SIGKILL" in err


def test_run_folder(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events-7-0.jsonl").write_text('{"time": 1, "event": "step"}\n')  # of an earlier, larger run
    run = start(
        HELLO
        + """
import json
with open(f"{os.environ['FTCOMM_EVENTS']}/events-{rank}-{incarnation}.jsonl", "a") as file:
    file.write(json.dumps({"time": 10 + rank, "rank": rank, "event": "step"}) + '\\n{"half a li')
""",
        "--nproc-per-node",
        "2",
        "--events",
        str(folder),
    )
    code, _, err = run.finish()
    assert code == 0, err
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [e["time"] for e in events] == sorted(e["time"] for e in events)
    assert [e["rank"] for e in events if e["event"] == "step"] == [0, 1]
    assert len([e for e in events if e["event"] == "exit"]) == 2


def test_without_a_run_folder_nothing_is_left(start: Start, tmp_path: Path) -> None:
    run = start(HELLO + "say(os.environ['FTCOMM_EVENTS'])")
    (folder,) = run.read_lines(1)
    code, _, err = run.finish()
    assert code == 0, err
    assert not Path(folder).exists()
    assert list(tmp_path.glob("torchelastic*")) == []
    assert re.match(r"ftrun-\d+-", Path(folder).name)


def test_a_wrong_option_is_told_once(start: Start) -> None:
    code, out, err = start(HELLO + "say('started')", "--policy", "hopeful", "--nproc-per-node", "2").finish()
    assert (code, out) == (2, "")
    assert err.count("hopeful") == 1


def test_when_all_have_failed_it_is_over(start: Start) -> None:
    """As with gloo, where the others raise: replacements would only find what the first workers left in the store."""
    run = start(
        HELLO + "say(rank, incarnation); sys.exit(1) if incarnation == 0 else signal.pause()", "--nproc-per-node", "3"
    )
    code, out, err = run.finish()
    assert code == 1
    assert {"0 0", "1 0", "2 0"} <= set(out.split("\n"))
    assert "no worker is left that it could join" in err


def test_a_worker_that_was_killed_while_it_wrote_its_error(start: Start) -> None:
    """torch's @record writes it; what is there is no JSON."""
    run = start(
        HELLO
        + """
if incarnation == 0:
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write('{"message": ')
    os._exit(1)
say("here")
"""
    )
    code, out, err = run.finish()
    assert (code, out) == (0, "here\n"), err


def test_only_files_are_removed_where_errors_would_be(tmp_path: Path) -> None:
    """With `--log-dir /dev/null` they would be there."""
    os.mkfifo(tmp_path / "null")
    context = WorkerContext.__new__(WorkerContext)
    context.error_files = {0: str(tmp_path / "null")}
    assert context.failure(Slot(0, 0, 0, 0, 0), 1, 7).exitcode == 7
    assert (tmp_path / "null").exists()


def test_an_ftrun_that_a_worker_starts_has_a_run_folder_of_its_own(start: Start, tmp_path: Path) -> None:
    inner = "import os; print(os.environ['FTCOMM_EVENTS'], flush=True)"
    (tmp_path / "inner.py").write_text(inner)
    run = start(
        HELLO
        + """
import subprocess, sys
say(os.environ["FTCOMM_EVENTS"])
subprocess.run([sys.executable, "-m", "ftcomm.launch.cli", os.environ["WORK"] + "/inner.py"], check=True)
assert os.path.exists(os.environ["FTCOMM_EVENTS"])
"""
    )
    outer, within = run.read_lines(2)
    code, _, err = run.finish()
    assert code == 0, err
    assert outer != within
