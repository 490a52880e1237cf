"""ftrun with workers that train over backend="ftcomm": a worker dies, leaves, is replaced, is given up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launch.running import Start

pytest.importorskip("ftcomm.torch")

# Ends when UNTIL holds at a join point: step and alive are the same on all ranks there.
SCRIPT = """
import hashlib, os, torch, torch.distributed as dist
import ftcomm.torch
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("ftcomm")
rank = dist.get_rank()
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
ddp.register_comm_hook(None, ftcomm.torch.lossy_hook)
optimizer = torch.optim.Adam(ddp.parameters())

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

while True:
    here = ftcomm.torch.join_point(ddp, optimizer)
    step, alive = here.step, here.alive
    if step == 1:
        say("training", rank, os.getpid())
    if UNTIL:
        break
    torch.manual_seed(1000 * step + rank)
    loss = ddp(torch.randn(4, 300)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
say("done", rank, os.environ["FTCOMM_INCARNATION"], list(alive), hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
"""
KILL = "rank=1,at=collective.part:1,step=3,do=kill"


def script(until: str) -> str:
    return SCRIPT.replace("UNTIL", until)


def done(out: str) -> list[list[str]]:
    return sorted(line.split(maxsplit=3)[1:] for line in out.splitlines() if line.startswith("done"))


def test_a_killed_worker_is_replaced_and_all_end_equal(start: Start) -> None:
    run = start(script("step > 3 and len(alive) == 3"), "--nproc-per-node", "3", "--policy", "lossy", "--faults", KILL)
    code, out, err = run.finish()
    assert code == 0, err
    ended = done(out)
    assert [one[:2] for one in ended] == [["0", "0"], ["1", "1"], ["2", "0"]]
    assert len({one[2] for one in ended}) == 1
    for line in (
        "rank 1: fault at collective.part: kill",
        "of communicator world repaired: contributors ",
        "slot 1 rejoined at step",
    ):
        assert err.count(line) == 1, err


def test_after_the_last_replacement_the_others_go_on(start: Start, tmp_path: Path) -> None:
    """They end when ftrun has said so: else it may see all three ends at once."""
    os.mkfifo(tmp_path / "said")
    run = start(
        script("step > 3 and len(alive) == 2 and os.open(os.environ['WORK'] + '/said', os.O_RDONLY)"),
        *("--nproc-per-node", "3", "--policy", "lossy", "--max-restarts", "0", "--faults", KILL),
    )
    run.hear("slot 1 is given up: --max-restarts is 0. The others run on.")
    said = os.open(tmp_path / "said", os.O_WRONLY)
    code, out, err = run.finish()
    os.close(said)
    assert code == 1
    assert [one[:2] for one in done(out)] == [["0", "0"], ["2", "0"]], err


def test_sigterm_to_one_worker_makes_it_leave(start: Start) -> None:
    run = start(script("len(alive) == 2"), "--nproc-per-node", "3", "--policy", "lossy")
    pids = {rank: int(pid) for _, rank, pid in (line.split() for line in run.read_lines(3))}
    os.kill(pids["1"], signal.SIGTERM)
    code, out, err = run.finish()
    assert code == 0, err
    assert [one[:2] for one in done(out)] == [["0", "0"], ["2", "0"]]
    assert "rank 1 left before step" in err
    assert "replacement" not in err


def test_uncaught_failures_end_the_job(start: Start) -> None:
    """Policy raise, and a script that handles nothing: the survivors' error is the end, not a loop of restarts."""
    run = start(script("False"), "--nproc-per-node", "3", "--faults", KILL)
    code, out, err = run.finish()
    assert code == 1
    assert done(out) == []
    assert "BackendError: ftcomm: all_reduce" in err
    assert "no worker is left that it could join" in err
    assert "rank 1 failed for good: killed by SIGKILL" in err, err
    assert "rank 2 failed for good: exit code 1" in err, err
