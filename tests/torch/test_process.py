"""The backend as a part of a process: builds, signals, forks, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ftcomm
import ftcomm.torch
from ftcomm.torch import _extension


def test_other_torch_is_refused(tmp_path, monkeypatch):
    (tmp_path / "torch_version.txt").write_text("2.0.1+other\n")
    real = _extension.native_path
    monkeypatch.setattr(
        _extension, "native_path", lambda name: str(tmp_path / name) if name == "torch_version.txt" else real(name)
    )
    monkeypatch.delitem(sys.modules, "_ftcomm_torch", raising=False)
    with pytest.raises(ftcomm.ConfigError, match="2.0.1") as caught:
        _extension.load()
    assert torch.__version__ in str(caught.value)
    assert "pip install" in str(caught.value)


def interrupted(context):
    if dist.get_rank() == 1:
        context.hold()
        return
    context.mark("waiting")
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.ones(10))
    context.mark("interrupted")


def test_ctrl_c(world):
    group = world.start(2, interrupted)
    group.wait_for(0, "waiting")
    wait_until_blocked(group.pid(0))
    group.kill(0, signal.SIGINT)
    group.wait_for(0, "interrupted")
    group.release(1)
    world.values(group)


def wait_until_blocked(pid: int) -> None:
    """Until the main thread sleeps in the kernel: a signal then interrupts the wait itself."""
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S":
        os.sched_yield()


def forked(context):
    dist.all_reduce(torch.ones(1))
    pid = os.fork()
    if pid == 0:  # as a DataLoader worker: it must not take part, nor keep anything open
        code = 1
        try:
            dist.all_reduce(torch.ones(1))
        except dist.DistBackendError:
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dist.all_reduce(t := torch.ones(1))
    assert t.item() == 2


def test_forked_child_is_refused(world):
    world(2, forked)


def timed(context):
    if dist.get_rank() == 1:
        context.hold()
        return
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert not work.is_completed()
    from datetime import timedelta

    with pytest.raises(dist.DistBackendError, match="Timed out"):
        work.wait(timedelta(milliseconds=50))
    context.mark("timed out")


def test_a_wait_of_its_own_timeout(world):
    group = world.start(2, timed)
    group.wait_for(0, "timed out")
    group.release(1)
    world.values(group)


def dropped(context):
    for _ in range(20):  # nobody waits; the memory must live on by itself
        dist.all_reduce(torch.ones(100_000), async_op=True)
    dist.barrier()


def test_dropped_works(world):
    world(2, dropped)


SCRIPT = """
import torch, torch.distributed as dist
import ftcomm.torch; ftcomm.torch.register_backend()
dist.init_process_group("ftcomm")
t = torch.ones(4)
dist.all_reduce(t)
assert t[0] == 2
print("done", flush=True)
"""


def test_script_without_destroy(tmp_path, torch_store):
    """env://, and an end without destroy_process_group: no hang, no crash, exit status 0."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": torch_store[0], "MASTER_PORT": str(torch_store[1])}
    environment.update(TORCHELASTIC_USE_AGENT_STORE="True", FTCOMM_JOB=f"script-{os.getpid()}-{time.monotonic_ns()}")
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out
        assert "done" in out


def left_by_its_communicator(context):
    dist.all_reduce(torch.ones(1))
    ftcomm.torch.communicator(dist.group.WORLD).leave()
    with pytest.raises(dist.DistBackendError, match="closed"):
        dist.all_reduce(torch.ones(1))  # and destroy_process_group, which follows


def test_groups_outlive_the_job(world):
    world(2, left_by_its_communicator)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3)], ids=str)
def test_ranks_of_different_world_sizes(ranks, torch_store, sizes):
    """Who waits for a rank that the others do not know of hears so at once, not at the end of its timeout."""

    def told(group, context):
        store = dist.PrefixStore(group.job, dist.TCPStore(*torch_store, is_master=False))
        with pytest.raises(Exception, match="has world size"):
            dist.init_process_group("ftcomm", store=store, rank=context.rank, world_size=sizes[context.rank])

    ranks(2, told, direct=False)
