"""``async_op=False``: who waits rings later for whom it has sent something; see tests/direct/test_bells.py."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist


@pytest.mark.parametrize("count", [2, 1 << 18])
def test_a_member_that_computes(world: Any, count: int) -> None:
    def run(context: Any) -> float:
        data = torch.full((count,), context.rank + 1.0)
        dist.barrier()
        time.sleep(0.1)  # until the thread that looks for mail has gone to sleep
        if context.rank == 0:
            context.hold()
            dist.all_reduce(data)
        else:
            work = dist.all_reduce(data, async_op=True)
            context.mark("computes")
            while not work.is_completed():
                pass
        return float(data[0])

    group = world.start(2, run, heartbeat=4000.0, timeout=5000.0)  # a tick each 200 s
    group.wait_for(1, "computes")
    group.release(0)
    assert [r.value for r in group.results()] == [3.0, 3.0]
