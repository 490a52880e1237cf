"""``async_op=False``: who waits rings later for whom it has sent something; see tests/direct/test_bells.py."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist


def by_call(data: torch.Tensor) -> None:
    dist.all_reduce(data)


def by_looking(data: torch.Tensor) -> None:
    """It said that it would wait, and does not."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    work = dist.group.WORLD.allreduce([data], options)
    while not work.is_completed():
        pass


@pytest.mark.parametrize("all_reduce", [by_call, by_looking])
@pytest.mark.parametrize("count", [2, 1 << 18])
def test_a_member_that_computes(world: Any, count: int, all_reduce: Any) -> None:
    def run(context: Any) -> float:
        data = torch.full((count,), context.rank + 1.0)
        dist.barrier()
        time.sleep(0.1)  # until the thread that looks for mail has gone to sleep
        if context.rank == 0:
            context.hold()
            all_reduce(data)
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
