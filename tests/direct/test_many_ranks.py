"""More ranks on one host than each of them watches: a death is seen by those before it, however many of these have died."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from harness import Context, Ranks

import ftcomm

SIZE, WATCHED = 24, 16
FIRST, SECOND = range(3, 20), 20  # a row of more than WATCHED, and the one behind it


def pidfds() -> int:
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sum("pidfd" in os.readlink(link) for link in links if os.path.islink(link))


def test_a_row_of_deaths_and_then_the_next_one(ranks: Ranks) -> None:
    """Without ticks, which look at all: an hour's heartbeat."""

    def run(comm: ftcomm.Communicator, context: Context) -> Any:
        comm.barrier()
        watched = pidfds()
        comm.barrier()
        buf = np.ones(1)
        if comm.rank in FIRST:
            context.mark("waits to die")
            context.hold()
        first = comm.all_reduce(buf).contributors
        if comm.rank == SECOND:
            context.mark("waits to die")
            context.hold()
        buf[:] = 1
        second = comm.all_reduce(buf).contributors
        return first, second, float(buf[0]), watched

    group = ranks.start(SIZE, run, transport="shm", policy="lossy", heartbeat=3600.0, timeout=7200.0)
    for rank in FIRST:
        group.wait_for(rank, "waits to die")
    for rank in FIRST:
        group.kill(rank)
    group.wait_for(SECOND, "waits to die")
    group.kill(SECOND)
    values = ranks.values(group, dies={*FIRST, SECOND})
    living = [r for r in range(SIZE) if r not in FIRST]
    last = [r for r in living if r != SECOND]
    for rank in last:
        first, second, total, watched = values[rank]
        assert first == tuple(living)
        assert second == tuple(last)
        assert total == len(last)
        assert watched == WATCHED
