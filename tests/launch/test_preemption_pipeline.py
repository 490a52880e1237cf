"""SIGTERM to a pipeline: at which step its stages stop, what is said then, and who hears of it first."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launch.running import Ftrun, Start

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """
import os, runpy, signal, sys, torch
sys.path.insert(0, {examples!r})
import ftcomm.recovery
from ftcomm.errors import SystemFailure
from ftcomm.launch import preempt
from ftcomm.recovery.engine import stopping

rank, again = int(os.environ["RANK"]), os.environ["FTCOMM_INCARNATION"] != "0"

def say(text):
    os.write(1, (text + "\\n").encode())

def all_are_told():
    preempt.leave_notice(preempt.folder(), 0, range(2))
    os.kill(os.getpid(), signal.SIGTERM)

class Engine(ftcomm.recovery.Engine):
    def __init__(self, layers, optimizer, *args, **more):
        super().__init__(layers, optimizer, *args, **more)
        update, forget = optimizer.step, optimizer.zero_grad
        if os.environ.get("EVERY_SECOND"):
            optimizer.step = lambda: update() if self.step_number % 2 else None
            optimizer.zero_grad = lambda: forget() if self.step_number % 2 else None

    def steps(self, *args, **more):
        for step, batch in super().steps(*args, **more):
            self.in_step(step)
            yield step, batch

    def in_step(self, step):
        {in_step}

ftcomm.recovery.Engine = Engine
sys.argv = ["pipeline_engine.py", "--epochs", "2", "--samples", "320", "--every", "1000", "--checkpoints", os.environ["FOLDER"]]
runpy.run_path({examples!r} + "/pipeline_engine.py", run_name="__main__")
"""

Run = Callable[..., Ftrun]


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Run:
    def begin(in_step: str = "pass", folder: str = "folder", **env: str) -> Ftrun:
        text = SCRIPT.format(examples=str(EXAMPLES), in_step=in_step.strip().replace("\n", "\n        "))
        flags = ("--nproc-per-node", "2", "--policy", "replay")
        return start(text, *flags, FOLDER=str(tmp_path / folder), **env)

    return begin


@pytest.mark.table
def test_not_in_the_middle_of_an_accumulation(run: Run) -> None:
    """All are told in step 4, and so would stop before step 7, whose gradients are to be added to those of step 6."""
    told = "if step == 4: all_are_told()"
    code, _, err = run(told, EVERY_SECOND="1").finish()
    assert code == 0, err
    assert "SIGTERM: all leave before step 8; its state is in a checkpoint" in err


def test_a_checkpoint_that_one_stage_cannot_write(run: Run) -> None:
    full = """
def save(*args, **how):
    raise SystemFailure("The disk is full.")
if step == 4:
    all_are_told()
    if rank == 1:
        self._state.save = save
"""
    code, _, err = run(full).finish()
    assert code == 0, err
    assert "rank 1: no checkpoint of step 7: The disk is full." in err
    assert "SIGTERM: all leave before step 7; its state is lost, as a stage could not write its own" in err
    assert "its state is in a checkpoint" not in err


def test_workers_that_get_it_before_ftrun(run: Run) -> None:
    """As from whoever stops a service, which sends it to all processes at once."""
    taken = """
if step == 1:
    stopping._NOTICE_WITHIN = 100.0
    os.kill(os.getpid(), signal.SIGTERM)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    say("taken")
    os.read(read, 1)
"""
    here = run(taken)
    lines: list[str] = []
    while lines.count("taken") < 2:
        lines += here.read_lines(1)
    here.send(signal.SIGTERM)
    code, _, err = here.finish()
    assert code == 143, err
    assert re.search(r"SIGTERM: all leave before step \d+; its state is in a checkpoint", err), err


@pytest.mark.table
@pytest.mark.parametrize("wait", ["signal.pause()", "torch.futures.Future().wait()"])
def test_one_stage_alone_ends_and_is_replaced(run: Run, wait: str) -> None:
    """Also one that waits where torch runs no handlers of Python's, as DistributedDataParallel does for an all-reduce."""
    alone = f"""
stopping._NOTICE_WITHIN = 0.5
if step == 4 and rank == 1 and not again:
    os.kill(os.getpid(), signal.SIGTERM)
    while True: {wait}
"""
    code, out, err = run(alone).finish()
    assert code == 0, err
    assert "rank 1 died (SIGTERM); the others wait" in err, err
    assert "leave" not in err
    assert out.splitlines()[-1].startswith("digest")
