"""Two ftruns on one host, as on a machine where somebody tries several nodes, or in two containers: each has a log of its own."""

from __future__ import annotations

import pytest
from launch.running import Start
from ports import free_port

WORK = """
import os, signal
import numpy as np
import ftcomm
comm = ftcomm.init()
for step in range(8):
    x = np.full(1000, float(step))
    if (comm.rank, step, os.environ["FTCOMM_INCARNATION"]) == (1, 4, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(x)
    assert (x == 4 * step).all(), x
print("done", comm.rank, flush=True)
"""


@pytest.mark.forks_workers
def test_a_replacement_beside_another_ftrun(start: Start) -> None:
    place = ("--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    common = ("--nnodes", "2", "--nproc-per-node", "2", "--policy", "replay", *place)
    nodes = [start(WORK, *common, "--node-rank", str(node)) for node in range(2)]
    ends = [node.finish() for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sorted(word for _, out, _ in ends for word in out.split("\n") if word) == [f"done {r}" for r in range(4)]
