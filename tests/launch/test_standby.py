"""A worker that is started again out of a standby is as one that was started afresh, and standbys never outlive their job."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from launch.running import Ftrun, Start, clean_environment, wait_gone
from tables import most

pytestmark = pytest.mark.execs_workers

TABLE = pytest.mark.table

HELLO = """
import os, signal, sys
rank, incarnation = int(os.environ["RANK"]), int(os.environ["FTCOMM_INCARNATION"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def wait(name): return open(f"{os.environ['WORK']}/{name}").read()
"""
DIES_ONCE = (
    HELLO
    + """
if incarnation == 0:
    wait("fifo0")
    os.kill(os.getpid(), signal.SIGKILL)
"""
)


def standbys(run: Ftrun, count: int) -> list[int]:
    """The next ``count`` that get ready: their pids."""
    return [int(re.findall(r"pid (\d+)", run.hear("a standby is ready")[-1])[0]) for _ in range(count)]


def lives(pid: int) -> bool:
    """Also while nobody has reaped it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def site_packages(base: Path) -> Path:
    """One that counts as the user's, with ``base`` as PYTHONUSERBASE."""
    folder = base / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    folder.mkdir(parents=True)
    return folder


def test_a_replacement_is_made_of_a_standby(start: Start, tmp_path: Path) -> None:
    for n in range(3):
        os.mkfifo(tmp_path / f"fifo{n}")
    run = start(
        HELLO
        + """
say(rank, incarnation, os.getpid())
if rank == 1 and incarnation == 0:
    wait("fifo0")
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0: wait("fifo1")
else:
    import json, time
    event = {"time": time.time(), "rank": 1, "incarnation": 1, "event": "joined", "slot": 1, "slot_incarnation": 1}
    with open(f"{os.environ['FTCOMM_EVENTS']}/events-1-1.jsonl", "a") as file: file.write(json.dumps(event) + "\\n")
    wait("fifo2")
say(rank, "has ended")
""",
        *("--policy", "replay", "--pair-log", str(tmp_path), "--standby", "1", "--nproc-per-node", "2"),
    )
    first = run.read_lines(2)
    (standby,) = standbys(run, 1)
    (tmp_path / "fifo0").write_text("go")
    assert run.read_lines(1) == [f"1 1 {standby}"]
    assert {line.split()[0] for line in first} == {"0", "1"}
    run.hear(f"slot 1: replacement 1 started from a standby (pid {standby})")[-1]
    (following,) = standbys(run, 1)  # in its place
    (tmp_path / "fifo1").write_text("go")
    (tmp_path / "fifo2").write_text("go")
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["0 has ended", "1 has ended"]
    assert not lives(following)


# Each rank but 0 dies once and tells, as its replacement, all that it sees of its process; then it ends in a way of its own.
SELF_PORTRAIT = """
'''A script.'''
import atexit, ctypes, json, multiprocessing, os, pickle, resource, signal, sys, threading
import numpy, sets
rank, incarnation = int(os.environ["RANK"]), int(os.environ["FTCOMM_INCARNATION"])

class Thing:
    def __init__(self, number): self.number = number

def check(thing, expected):
    assert type(thing).__name__ == "Thing" and thing.number == expected

def portrait():
    names = sorted(globals())
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
    thing = pickle.loads(pickle.dumps(Thing(7)))
    child = multiprocessing.get_context("spawn").Process(target=check, args=(thing, 7))
    child.start()
    child.join()
    with open("/proc/self/status") as status:
        masks = [line for line in status if line.startswith("Sig") and "SigQ" not in line]
    return {
        "names": names, "name": __name__, "file": __file__, "doc": __doc__, "package": __package__,
        "spec": __spec__ and __spec__.name, "loader": type(__loader__).__name__, "thing": repr(Thing.__module__),
        "main": sys.modules["__main__"].__dict__ is globals(), "child": child.exitcode, "code": portrait.__code__.co_flags,
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
        "environment": dict(os.environ), "folder": os.getcwd(), "hash": hash("these words"),
        "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
        "descriptors": DESCRIPTORS, "signals": masks, "death": death.value, "session": os.getsid(0) == os.getpid(),
        "handlers": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "schedules": sorted({os.sched_getscheduler(int(t)) for t in os.listdir("/proc/self/task")}),
        "nice": os.nice(0), "threads": threading.active_count(), "hook": sys.excepthook is sys.__excepthook__,
    }

if __name__ == "__main__":
    DESCRIPTORS = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1]
    if incarnation == 0 and rank > 0:
        print("one", flush=True)
        open(f"{os.environ['WORK']}/fifo{rank}").read()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank > 0:
        with open(f"{os.environ['WORK']}/portrait{rank}", "w") as file: json.dump(portrait(), file)
    atexit.register(print, "at the exit")
    print("two")
    if rank == 1: sys.exit(3)
    if rank == 2: {}["key"]
    if rank == 3: os.kill(os.getpid(), signal.SIGINT)
    if rank == 4: os.kill(os.getpid(), signal.SIGTERM)
"""
RANKS = 5
OF_THE_RUN = {
    "FTCOMM_JOB",
    "FTCOMM_SECRET",
    "FTCOMM_EVENTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "MASTER_PORT",
}


def outcome(folder: Path, count: int, module: bool) -> dict[str, Any]:
    """Of a run in which all but one are replaced: what the replacements saw of themselves, printed, and ended with."""
    folder.mkdir()
    for rank in range(1, RANKS):
        os.mkfifo(folder / f"fifo{rank}")
    (folder / "portrayed.py").write_text(SELF_PORTRAIT)
    site = site_packages(folder)
    sets = "import os\nos.environ['SET_BY_AN_IMPORT'] = os.environ['LANG'] = 'C'\ndel os.environ['DELETED']\n"
    (site / "sets.py").write_text(sets)
    target = ["-m", "portrayed"] if module else ["./portrayed.py"]
    flags = [
        "--nproc-per-node",
        str(RANKS),
        "--max-restarts",
        "1",
        "--redirects",
        "3",
        "--log-dir",
        str(folder / "logs"),
    ]
    environment = clean_environment(
        WORK=str(folder),
        TMPDIR=str(folder),
        PYTHONHASHSEED="5",
        LANG="C.UTF-8",
        DELETED="by an import",
        PYTHONPATH=str(site),
        PYTHONUSERBASE=str(folder),
    )
    run = Ftrun(
        [*flags, "--standby", str(count), *target, "--with", "two words", "${local_rank}"], environment, cwd=folder
    )
    try:
        standbys(run, count)
        for rank in range(1, RANKS):
            (folder / f"fifo{rank}").write_text("go")
        code, _, err = run.finish()
    finally:
        run.process.kill()
    assert err.count("started from a standby") == count, err
    found: dict[str, Any] = {"code": code, "ends": sorted(re.findall(r"rank \d failed for good: .*", err))}
    for rank in range(1, RANKS):
        portrait = json.loads((folder / f"portrait{rank}").read_text())
        environment = portrait["environment"]
        portrait["environment"] = {k: "" if k in OF_THE_RUN else v for k, v in environment.items()}
        found[f"portrait {rank}"] = portrait
        for stream in ("stdout", "stderr"):
            (log,) = (folder / "logs").rglob(f"{rank}/{stream}.log")
            found[f"{stream} {rank}"] = log.read_text()
    return json.loads(json.dumps(found).replace(str(folder), "FOLDER"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", most([False], [True]), ids=["script", "module"])
def test_it_is_as_one_that_was_started_afresh(tmp_path: Path, module: bool) -> None:
    fresh, standby = (outcome(tmp_path / str(count), count, module) for count in (0, RANKS - 1))
    for name, value in fresh.items():
        assert standby[name] == value, name
    assert fresh["ends"] == [
        "rank 1 failed for good: exit code 3",
        "rank 2 failed for good: exit code 1",
        "rank 3 failed for good: killed by SIGINT",
        "rank 4 failed for good: killed by SIGTERM",
    ]
    assert fresh["stdout 1"] == "one\ntwo\nat the exit\n"
    assert "KeyError" in fresh["stderr 2"]
    assert "KeyboardInterrupt" in fresh["stderr 3"]


def test_what_it_has_imported_is_what_the_script_imports(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo0")
    (tmp_path / "own.py").write_text("import os\nos.write(1, b'own\\n')\n")
    run = start(
        "import sys\nhad = [name in sys.modules for name in ('colorsys', 'own', 'ftcomm.communicator')]\n"
        "import colorsys, own\n" + DIES_ONCE + "say(*had)",
        *("--standby", "1"),
    )
    standbys(run, 1)
    (tmp_path / "fifo0").write_text("go")
    code, out, err = run.finish()
    assert (code, out) == (0, "own\nown\nTrue False True\n"), err


def test_sigkill_of_ftrun_leaves_no_standby(start: Start) -> None:
    run = start("import signal; signal.pause()", "--standby", "2")
    gone = [os.pidfd_open(pid) for pid in standbys(run, 2)]
    run.send(signal.SIGKILL)
    run.process.wait()
    wait_gone(gone)


def test_a_standby_sees_the_end_of_ftrun_by_itself(start: Start, tmp_path: Path) -> None:
    """Without the kernel's help: an import may have undone PR_SET_PDEATHSIG."""
    site = site_packages(tmp_path)
    undoes = (
        "import ctypes, os\nif 'RANK' not in os.environ: ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"  # not in the worker
    )
    (site / "undoes.py").write_text(undoes)
    script = "import undoes\nimport signal; signal.pause()"
    run = start(script, "--standby", "1", PYTHONPATH=str(site), PYTHONUSERBASE=str(tmp_path))
    gone = [os.pidfd_open(pid) for pid in standbys(run, 1)]
    run.send(signal.SIGKILL)
    run.process.wait()
    wait_gone(gone)


def test_ctrl_c_ends_the_standbys(start: Start) -> None:
    run = start("import signal; signal.pause()", "--standby", "1")
    (standby,) = standbys(run, 1)
    run.send(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 130, err
    assert not lives(standby)


def test_standbys_that_die_are_told_once_and_replacements_start_afresh(start: Start, tmp_path: Path) -> None:
    for n in range(2):
        os.mkfifo(tmp_path / f"fifo{n}")
    run = start(DIES_ONCE + "say(os.getpid()); wait('fifo1')", "--standby", "1")
    for _ in range(2):
        os.kill(standbys(run, 1)[0], signal.SIGKILL)
    run.hear("standbys end by themselves, the last one with killed by SIGKILL. No more are started")[-1]
    (tmp_path / "fifo0").write_text("go")
    pid = run.process.pid
    assert run.read_lines(1) == Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (tmp_path / "fifo1").write_text("go")
    code, _, err = run.finish()
    assert code == 0, err
    assert "slot 0: replacement 1 started (pid" in err
    assert "standby" not in err


def test_standbys_that_cannot_start(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo0")
    python = tmp_path / "python"
    refuse = 'case "$*" in *standby.py*) echo no memory >&2; exit 7;; esac'
    python.write_text(f'#!/bin/sh\n{refuse}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = start(DIES_ONCE + "say('again')", "--standby", "1", PYTHON_EXEC=str(python))
    run.hear("standbys end by themselves, the last one with exit code 7: no memory. No more are started")[-1]
    (tmp_path / "fifo0").write_text("go")
    code, out, err = run.finish()
    assert (code, out) == (0, "again\n"), err


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("import os\nos.environ.setdefault('RANK', '0')", "an import sets or deletes RANK"),
        pytest.param("import gone", "import imported: ModuleNotFoundError: No module named 'gone'", marks=TABLE),
        pytest.param("import sys\nsys.exit('no licence')", "import imported: SystemExit: no licence", marks=TABLE),
        pytest.param("import sys\nsys.path.insert(0, 'vendored')", "an import changes sys.path", marks=TABLE),
        ("import os\nos.chdir('/')", "an import changes sys.path, sys.argv or the working directory"),
        pytest.param("import netrc", "netrc.py is in place of the module netrc", marks=TABLE),
    ],
)
def test_imports_after_which_there_is_no_standby(start: Start, tmp_path: Path, written: str, why: str) -> None:
    os.mkfifo(tmp_path / "fifo0")
    site = site_packages(tmp_path)
    (site / "imported.py").write_text(written)
    if "netrc" in written:
        (tmp_path / "netrc.py").write_text("")
    script = "try: import imported\nexcept (ImportError, SystemExit): pass\n" + DIES_ONCE + "say('again', rank)"
    run = start(script, "--standby", "1", PYTHONPATH=str(site), PYTHONUSERBASE=str(tmp_path))
    assert why in run.hear("standbys end by themselves, the last one with exit code 1: ")[-1]
    (tmp_path / "fifo0").write_text("go")
    code, out, err = run.finish()
    assert (code, out) == (0, "again 0\n"), err
    assert "started from a standby" not in err


def test_one_that_is_dead_or_stopped(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo0")
    site = site_packages(tmp_path)
    (site / "forks.py").write_text("import os, signal\nif os.fork() == 0: signal.pause()\n")  # it keeps the socket open
    script = (
        "import forks\n"
        + DIES_ONCE
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.killpg(0, signal.SIGTERM); say(os.getpid())"
    )
    run = start(script, "--standby", "1", PYTHONPATH=str(site), PYTHONUSERBASE=str(tmp_path))
    os.kill(standbys(run, 1)[0], signal.SIGKILL)
    (stopped,) = standbys(run, 1)
    os.kill(stopped, signal.SIGSTOP)
    (tmp_path / "fifo0").write_text("go")
    assert run.read_lines(1) == [str(stopped)]
    code, _, err = run.finish()
    assert code == 0, err


def test_a_fault_of_ftruns_own_costs_no_standby(start: Start, tmp_path: Path) -> None:
    """Its folder is gone: the worker starts afresh, the standby stays."""
    for n in range(2):
        os.mkfifo(tmp_path / f"fifo{n}")
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "script.py").write_text(DIES_ONCE + "say(os.getpid()); wait('fifo1')")
    environment = clean_environment(WORK=str(tmp_path), TMPDIR=str(tmp_path))
    run = Ftrun(["--standby", "1", str(tmp_path / "script.py")], environment, cwd=folder)
    try:
        (standby,) = standbys(run, 1)
        folder.rmdir()
        (tmp_path / "fifo0").write_text("go")
        assert run.read_lines(1) != [str(standby)]
        assert lives(standby)
        (tmp_path / "fifo1").write_text("go")
        code, _, err = run.finish()
    finally:
        run.process.kill()
    assert code == 0, err
    assert "slot 0: replacement 1 started (pid" in err


def test_none_where_nobody_is_replaced(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo0")
    script = (
        HELLO + "say('here'); wait('fifo0'); say(open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read())"
    )
    run = start(script, "--standby", "1", "--max-restarts", "0")
    run.read_lines(1)
    (tmp_path / "fifo0").write_text("go")
    code, out, err = run.finish()
    assert code == 0, err
    assert len(out.split()) == 1
