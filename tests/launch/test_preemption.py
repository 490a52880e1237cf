"""SIGTERM to ftrun: all leave at the same step, with its state in a checkpoint, and nothing waits for a timeout."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch.running import Ftrun, Start
from tables import most
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

import ftcomm.recovery
from ftcomm.launch import preempt
from ftcomm.recovery.engine.stopping import Stopping

SCRIPT = """
import hashlib, os, signal
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import ftcomm.recovery

torch.set_num_threads(1)
dist.init_process_group("ftcomm")
rank, again = dist.get_rank(), os.environ["FTCOMM_INCARNATION"] != "0"
torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 8), torch.randn(400, 1))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters())
folder = os.environ["FOLDER"]
engine = ftcomm.recovery.Engine(model, optimizer, os.environ.get("STRATEGY", "replication"), checkpoint_dir=folder or None,
                                checkpoint_every=100000)

def say(text):
    os.write(1, (text + "\\n").encode())

def before(step): pass
BEFORE
for step, (x, y) in engine.steps(DataLoader(data, 2, shuffle=True), epochs=2):
    before(step)
    with engine.step():
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0 and engine.committed:
        say(f"step {step}")
if rank == 0:
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    say(f"weights {digest} of {engine.step_number} steps")
dist.destroy_process_group()
"""


def script(before: str = "") -> str:
    return SCRIPT.replace("BEFORE", before)


def steps_of(out: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)$", out, re.MULTILINE)]


def test_no_step_is_lost_and_none_is_trained_by_some_only(start: Start, tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "2", "--policy", "lossy")
    code, undisturbed, err = start(script(), *flags, FOLDER=str(tmp_path / "other")).finish()
    assert code == 0, err

    run = start(script(), *flags, FOLDER=str(tmp_path / "folder"))
    first = run.read_lines(20)
    run.send(signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 143, err
    (left,) = re.findall(r"SIGTERM: all leave before step (\d+); its state is in a checkpoint", err)
    done = steps_of("\n".join(first) + "\n" + out)
    assert done == [*range(int(left))]
    assert "killed" not in err, err
    assert set(re.findall(r"rank \d left before step (\d+)", err)) <= {left}, err

    code, out, err = start(script(), *flags, FOLDER=str(tmp_path / "folder")).finish()
    assert code == 0, err
    assert f"goes on from the checkpoint of step {left}" in err
    assert done + steps_of(out) == steps_of(undisturbed)
    assert out.splitlines()[-1] == undisturbed.splitlines()[-1]


def test_who_waits_for_a_replacement_leaves(start: Start, tmp_path: Path) -> None:
    never = """
if again:
    say("again")
    signal.pause()
"""
    run = start(
        script(never),
        "--nproc-per-node",
        "3",
        "--policy",
        "lossy",
        "--faults",
        "rank=1,at=step:10,do=kill",
        FOLDER=str(tmp_path / "f"),
    )
    while run.read_lines(1) != ["again"]:
        pass
    run.send(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 143, err
    assert "SIGTERM: all leave before step 10; its state is in a checkpoint" in err
    assert "did not end in time" not in err


@pytest.mark.parametrize("leaves", most([2], [0]))
def test_one_leaves_while_all_wait_for_a_replacement(start: Start, leaves: int) -> None:
    """It wakes the others; they wait on, not for it. Rank 2 has come in itself, as a replacement."""
    never = """
import atexit
if rank == 1 and again:
    say("again")
    signal.pause()
say(f"{rank} {again} {os.getpid()}")
def tell(event):
    if event["event"] == "awaiting":
        say(f"awaiting {rank} {event['step']}")
    if event["event"] == "left":
        say(f"left {rank}")
engine._kind._job.add_listener(tell)
"""
    faults = "rank=2,at=step:5,do=kill; rank=1,at=step:10,do=kill"
    run = start(script(never), "--nproc-per-node", "4", "--policy", "lossy", "--faults", faults, FOLDER="")
    said: list[str] = []
    # Of the first death: whoever comes to the step when the replacement has asked already does not wait for it.
    while not ("again" in said and all(f"awaiting {rank} 10" in said for rank in (0, 2, 3))):
        said += run.read_lines(1)
    pids = {
        line.split()[0]: int(line.split()[2]) for line in said if re.fullmatch(r"\d \w+ \d+", line)
    }  # the last one's
    os.kill(pids[str(leaves)], signal.SIGTERM)
    while f"left {leaves}" not in said:
        said += run.read_lines(1)
    stay = {0, 2, 3} - {leaves}
    while not all(said.count(f"awaiting {rank} 10") >= 2 for rank in stay):
        said += run.read_lines(1)
    run.send(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 143, err
    assert {*re.findall(r"rank (\d) left before step 10", err)} >= {str(leaves)}, err
    assert "did not end in time" not in err


@pytest.mark.parametrize("leaves", most([0], [1]))
@pytest.mark.table
def test_one_of_two_ftruns(start: Start, leaves: int) -> None:
    """Its workers leave at the same step; the other's go on to the end without them."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # in neither, so that either may go
    flags = (
        *("--nnodes", "2", "--nproc-per-node", "2", "--policy", "lossy", "--rdzv-backend", "c10d", "--rdzv-id", "two"),
        *("--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-conf", "is_host=0"),
    )
    tells = """
def before(step):
    say(f"begins {step}")
"""
    nodes = [start(script(tells), *flags, FOLDER="") for _ in range(2)]
    while nodes[leaves].read_lines(1) != ["begins 10"]:
        pass
    nodes[leaves].send(signal.SIGTERM)
    code, _, err = nodes[leaves].finish()
    assert code == 143, err
    left = re.findall(r"rank (\d) left before step (\d+)", err)
    assert len(left) == 2, err
    assert len({step for _, step in left}) == 1, err
    code, out, err = nodes[1 - leaves].finish()
    assert code == 0, err
    begun = [int(step) for step in re.findall(r"^begins (\d+)$", out, re.MULTILINE)]
    assert max(begun) > int(left[0][1]) + 100, err  # two ranks take more steps for what was left


@pytest.mark.parametrize("leaves", most(["survivors"], ["the dead"]))
@pytest.mark.table
def test_one_of_two_ftruns_while_all_wait_for_a_replacement(start: Start, leaves: str) -> None:
    """Its workers leave at once, and the other's wait on."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    flags = (
        *("--nnodes", "2", "--nproc-per-node", "2", "--policy", "lossy", "--rdzv-backend", "c10d", "--rdzv-id", "wait"),
        *("--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-conf", "is_host=0"),
        *("--faults", "rank=3,at=step:10,do=kill"),
    )
    never = """
if rank == 3 and again:
    signal.pause()
engine._kind._job.add_listener(lambda event: event["event"] == "awaiting" and say(f"awaiting {rank}"))
"""
    nodes = {}
    for node in [start(script(never), *flags, FOLDER="") for _ in range(2)]:
        while not (line := node.read_lines(1)[0]).startswith("awaiting"):
            pass
        nodes["the dead" if line == "awaiting 2" else "survivors"] = node
    leaver, other = nodes.pop(leaves), nodes.popitem()[1]
    leaver.send(signal.SIGTERM)
    leaver.hear("left before step 10, as told")
    while not other.read_lines(1)[0].startswith("awaiting"):
        pass
    other.send(signal.SIGTERM)
    for node in (leaver, other):
        code, _, err = node.finish()
        assert code == 143, err
        assert "did not end in time" not in err


def test_a_newcomer_whom_nobody_lets_in_leaves(start: Start) -> None:
    """The survivor is in the middle of a step, which it drops as rank 1 has no part in it, and leaves."""
    asking = """
if again:
    engine._kind._job.add_listener(lambda event: event["event"] == "asking" and say("asking"))
def before(step):
    if step == 10:
        signal.pause()
"""
    run = start(
        script(asking),
        "--nproc-per-node",
        "2",
        "--policy",
        "lossy",
        "--faults",
        "rank=1,at=step:10,do=kill",
        FOLDER="",
        STRATEGY="rollback",
    )
    while run.read_lines(1) != ["asking"]:
        pass
    run.send(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 143, err
    assert "SIGTERM: all leave before step 10; lost, as there is no checkpoint_dir" in err
    assert "did not end in time" not in err


@pytest.mark.table
def test_a_newcomer_that_is_told_to_leave_while_it_waits(start: Start, tmp_path: Path) -> None:
    """It alone: the others let it in, and hear of it at the next join point. They wait for nobody then."""
    os.mkfifo(tmp_path / "taken")
    asking = """
taken = os.open(os.environ["WORK"] + "/taken", os.O_RDWR)
if again:
    os.set_blocking(taken, False)
    engine._kind._job.add_listener(lambda event: event["event"] == "asking" and signal.set_wakeup_fd(taken))
if rank == 0:
    def hear(event):
        if event["event"] == "join-waiting":
            say("waits")
    engine._kind._job.add_listener(hear)
if again:
    say(f"pid {os.getpid()}")
def before(step):
    if step == 10 and rank == 0:
        os.read(taken, 1)
        globals()["before"] = lambda step: None
"""
    run = start(
        script(asking),
        "--nproc-per-node",
        "3",
        "--policy",
        "lossy",
        "--faults",
        "rank=1,at=step:10,do=kill",
        FOLDER="",
    )
    said: list[str] = []
    while not ("waits" in said and any(line.startswith("pid") for line in said)):
        said += run.read_lines(1)
    (pid,) = (int(line.split()[1]) for line in said if line.startswith("pid"))
    os.kill(pid, signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 0, err
    assert "rank 1 left before step 11" in err
    assert out.splitlines()[-1].startswith("weights")


@pytest.mark.table
def test_stages_of_a_pipeline_stop_at_the_same_step(start: Start, tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"

    def run(folder: str) -> Ftrun:
        arguments = [
            "pipeline_engine.py",
            "--epochs",
            "1",
            "--samples",
            "320",
            "--every",
            "1000",
            "--checkpoints",
            str(tmp_path / folder),
        ]
        text = f"""
        import runpy, sys
        sys.path.insert(0, {str(examples)!r})
        sys.argv = {arguments!r}
        runpy.run_path({str(examples / "pipeline_engine.py")!r}, run_name="__main__")
        """
        return start(text, "--nproc-per-node", "2", "--policy", "replay")

    code, undisturbed, err = run("other").finish()
    assert code == 0, err
    first = run("folder")
    assert first.read_lines(1)[0].startswith("step    0")
    first.send(signal.SIGTERM)
    code, out, err = first.finish()
    assert code == 143, err
    (left,) = re.findall(r"SIGTERM: all leave before step (\d+); its state is in a checkpoint", err)
    assert "did not end in time" not in err
    assert len(set(re.findall(r"rank \d left before step (\d+)", err))) == 1, err
    code, out, err = run("folder").finish()
    assert code == 0, err
    assert f"goes on from the checkpoint of step {left}" in err
    assert out.splitlines()[-1] == undisturbed.splitlines()[-1]


def test_after_the_loop_sigterm_ends_the_script_as_ever() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = ftcomm.recovery.Engine(model, optimizer)
    before = signal.getsignal(signal.SIGTERM)
    for _, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(4, 2)), 2)):
        assert signal.getsignal(signal.SIGTERM) is not before
        with engine.step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert signal.getsignal(signal.SIGTERM) is before is signal.SIG_DFL


def test_ended_by_break_it_is_the_same() -> None:
    model = torch.nn.Linear(2, 1)
    engine = ftcomm.recovery.Engine(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in engine.steps(DataLoader(TensorDataset(torch.ones(4, 2)), 2)):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        break
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def ended(body: Callable[[], object]) -> int:
    """The signal that ends a forked child; SIGALRM, if it would never end."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            body()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def test_sigterm_after_the_last_join_point_is_not_lost() -> None:
    def train() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = ftcomm.recovery.Engine(model, optimizer)
        engine._kind.finish = lambda: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[method-assign]
        for _, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(4, 2)), 2)):
            with engine.step():
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    assert ended(train) == signal.SIGTERM


def test_a_forked_child_ends_by_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As multiprocessing.Process.terminate() expects. A pipeline has another handler."""
    monkeypatch.setenv("FTCOMM_EVENTS", str(tmp_path))

    def child() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    assert preempt.install()
    try:
        assert ended(child) == signal.SIGTERM
    finally:
        preempt.uninstall()
    stopping = Stopping(0, 2)
    try:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert ended(child) == signal.SIGTERM
    finally:
        stopping.close(over=True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
