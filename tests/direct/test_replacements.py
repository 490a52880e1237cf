"""Replacements that wait for members who are gone: an error, and no wait for ever."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks

import ftcomm

Comm = ftcomm.Communicator


def lonely_replacement(ranks: Ranks, transport: str, faults: str = "") -> Group:
    """Of two ranks one has died, and its replacement waits for the other to let it in."""

    def run(comm: Comm, context: Context) -> Any:
        if context.incarnation:
            context.mark("waiting")
            with pytest.raises(ftcomm.PeerFailure, match="nobody is left") as failure:
                comm.job.join_wait().wait()
            context.mark("ended")
            return failure.value.ranks
        if comm.rank == 1:
            context.die()
        while comm.all_reduce(np.ones(100)).contributors != (0,):
            pass
        context.mark("without")
        return context.hold()

    group: Group = ranks.start(2, run, policy="lossy", transport=transport, heartbeat=0.5, faults=faults)
    group.wait_for(0, "without")
    group.spawn(1, run, incarnation=1)
    group.wait_for(1, "waiting")
    return group


def test_a_replacement_that_nobody_can_let_in(ranks: Ranks, transport: str) -> None:
    """The last member dies while the replacement waits: an error, and no wait for ever."""
    group = lonely_replacement(ranks, transport)
    group.kill(0)
    results = group.results()
    assert results[-1].value == (0,), "\n".join(r.text() for r in results)


def test_a_replacement_that_slept_while_the_last_member_died(ranks: Ranks, transport: str) -> None:
    """What it knew of the death it has forgotten when it wakes up (M11): it finds out again. It asks once a heartbeat."""
    group = lonely_replacement(ranks, transport, faults="rank=1.1,at=join.request:3,do=stop:0.5")
    group.kill(0)
    results = group.results()
    assert results[-1].value == (0,), "\n".join(r.text() for r in results)


def test_a_replacement_whose_last_member_stops(ranks: Ranks, transport: str) -> None:
    """No evidence of a death at all, only silence: an error, later."""
    group = lonely_replacement(ranks, transport)
    group.kill(0, signal.SIGSTOP)
    group.wait_for(1, "ended")
    group.kill(0)
    results = group.results()
    assert results[-1].value == (0,), "\n".join(r.text() for r in results)
