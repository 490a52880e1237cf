"""Two ftruns on one host, as on a machine where somebody tries several nodes, or in two containers: each has a log of its own."""

from __future__ import annotations

from launch.running import Start, start_nodes

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


def test_a_replacement_beside_another_ftrun(start: Start) -> None:
    ends = [node.finish() for node in start_nodes(start, WORK, 2, 2, "--policy", "replay")]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sorted(word for _, out, _ in ends for word in out.split("\n") if word) == [f"done {r}" for r in range(4)]
