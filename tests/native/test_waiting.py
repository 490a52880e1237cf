"""How a rank waits: a moment with its eyes open, then asleep."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import native_ranks as nr
import pytest
from processors import on_one_processor


@pytest.mark.parametrize("processors", ["shared", "one each"])
def test_whoever_waits_long_sleeps(ranks: nr.Ranks, processors: str) -> None:
    """Rank 1 comes to an operation only when it has seen rank 0, which is in it, sleep."""
    if processors == "one each" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one processor")

    def body(_: nr.Channel, job: nr.Job, comm: int) -> Any:
        waiting, _ = job.all_reduce(comm, [os.getpid() if job.rank == 0 else 0, 0])
        state = ""
        if job.rank == 1:
            deadline = time.monotonic() + nr.DEADLINE / 2
            while state != "S" and time.monotonic() < deadline:
                state = Path(f"/proc/{int(waiting)}/stat").read_text().rpartition(")")[2].split()[0]
        values = job.all_reduce(comm, [1.0])
        job.leave()
        job.close()
        return values, state

    with on_one_processor() if processors == "shared" else nullcontext():
        ranks.start(2, body)
    assert [ranks.result(rank) for rank in range(2)] == [([2.0], ""), ([2.0], "S")]
