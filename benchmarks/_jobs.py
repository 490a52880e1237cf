"""Launchers as the drivers of benchmarks start them, and a job from its start to its end with nothing left of it."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ftcomm.launch.parent import die_with_launcher

FTRUN = [sys.executable, "-m", "ftcomm.launch.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# With the store that torchrun (torch 2.13) shares between its restarts, gloo finds the dead processes' addresses there. Not for
# ftrun and torchft: a store that the first worker hosts dies with it.
TORCHRUN_GLOO = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *TORCHRUN]
# About one start in 75 ends so, whatever is started.
MPIRUN_FAILED = "PMIx server's listener thread failed to start"


def tool(name: str) -> str | None:
    """The environment's own where it has one, also when it is not activated."""
    return shutil.which(name, path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))


@functools.cache
def mpirun() -> str | None:
    """Open MPI 5's, which knows --with-ft."""
    found = tool("mpirun")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout if found else ""
    version = re.search(r"\(Open MPI\) (\d+)", said)
    return found if version and int(version[1]) >= 5 else None


def under_ulfm(ranks: int, *options: str) -> list[str]:
    """What goes before a rank's command. There has to be an mpirun()."""
    launcher = [str(mpirun()), "--with-ft", "ulfm", "--oversubscribe", "--allow-run-as-root"]
    return [*launcher, *options, "-n", str(ranks)]


def restarting(ranks: int, backend: str) -> list[str]:
    """A launcher that starts all ranks again when one of them has died: torchrun for gloo, ftrun for ftcomm."""
    if backend == "ftcomm":
        return [*FTRUN, "--nproc-per-node", str(ranks), "--policy", "raise", "--max-restarts", "1"]
    return [*TORCHRUN_GLOO, "--nproc-per-node", str(ranks), "--max-restarts=1"]


class Broken(RuntimeError):
    """A round that measures nothing; the text says why."""


def one_thread(folder: Path) -> dict[str, str]:
    """The environment of a job: one thread a process, and temporary files where they go with the folder."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **one, "TMPDIR": str(folder)}  # killed workers and torchrun leave theirs


@contextlib.contextmanager
def all_tidied() -> Iterator[Path]:
    """A folder for all runs of a benchmark. However it ends, no process that was started with it is left, nor a file."""
    told = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for number_of_any in told:  # the next one would cut the tidying short
            signal.signal(number_of_any, signal.SIG_IGN)
        sys.exit(128 + number)

    folder = Path(tempfile.mkdtemp(prefix="ftcomm-bench-"))
    try:
        for number in told:
            signal.signal(number, end)
        yield folder
    finally:
        for number in told:
            signal.signal(number, signal.SIG_IGN)
        kill_all(folder)
        shutil.rmtree(folder, ignore_errors=True)
        for number in told:
            signal.signal(number, signal.SIG_DFL)


def kill_all(folder: Path) -> None:
    """Every process with the folder, or one in it, for temporary files: launchers, workers in sessions of their own, what they
    forked. Until a look finds none: a launcher may have started another one meanwhile."""
    mine = b"\0TMPDIR=" + os.fsencode(folder)
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                at = (b"\0" + (process / "environ").read_bytes() + b"\0").find(mine)
                if at >= 0 and int(process.name) != os.getpid():
                    found.append(int(process.name))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            for left in Path("/dev/shm").glob(f"torch_{pid}_*"):  # between a loader's opening and its unlinking
                left.unlink(missing_ok=True)
        if not found:
            return


def start(command: list[str], environment: dict[str, str], out: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C is for the driver, which ends all. A driver that was killed cannot: the kernel tells the
    process to end then, and a launcher ends its workers."""
    told = die_with_launcher(signal.SIGTERM)
    with open(out, "wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=told,  # noqa: PLW1509 - two system calls, no lock
        )


def tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""


def run_job(command: list[str], environment: dict[str, str], patience: float, name: str) -> None:
    """Until the launcher has ended; with all that it has started if that takes too long, or this process is to end."""
    folder = Path(environment["TMPDIR"])
    out = folder / "out"
    process = start(command, environment, out)
    try:
        code = process.wait(patience)
    except BaseException as error:
        process.terminate()  # ftrun removes the job's log from shared memory
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        if isinstance(error, subprocess.TimeoutExpired):
            raise Broken(f"{name}: not over after {patience:.0f} s\n{tail(out)}") from None
        raise
    finally:
        kill_all(folder)
        process.wait()
    if code != 0:
        raise Broken(f"{name}: exit code {code}\n{tail(out)}")
