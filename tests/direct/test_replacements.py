"""Replacements that wait for members who are gone: an error, and no wait for ever."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks

import ftcomm
from ftcomm._lib import lib

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


def test_a_replacement_that_finds_its_host_stopped(ranks: Ranks) -> None:
    """For longer than two heartbeats. What the job decides is in the memory that it asks for: without it, it could do nothing."""

    def run(comm: Comm, context: Context) -> Any:
        if context.incarnation:
            comm.job.join_wait().wait()
        else:
            asked = threading.Event()
            comm.job.add_listener(lambda event: asked.set() if event["event"] == "join-waiting" else None)
            if comm.rank == 1:
                context.die()
            while comm.all_reduce(np.ones(100)).contributors != (0,):
                pass
            context.mark("without")
            lib()[1].ft_fault_step(1)
            asked.wait()
            comm.job.admit().wait()
        return comm.all_reduce(np.ones(2)).contributors

    faults = "rank=0,at=step:1,do=stop:3"
    group = ranks.start(2, run, policy="lossy", transport="auto", heartbeat=0.25, faults=faults)
    group.wait_for(0, "without")
    group.wait_stopped(0)  # or it gives the memory first, and then is silent for longer than a replacement waits
    group.spawn(1, run, incarnation=1)
    results = group.results()
    assert [result.value for result in results] == [(0, 1), None, (0, 1)], "\n".join(r.text() for r in results)


def test_what_a_script_makes_before_it_is_let_in(ranks: Ranks) -> None:
    """The same calls give the same communicators as in the process before it; colors it cannot ask for."""

    def run(comm: Comm, context: Context) -> Any:
        asked = threading.Event()
        comm.job.add_listener(lambda event: asked.set() if event["event"] == "join-waiting" else None)
        comm.broadcast(np.ones(4))
        first = comm.dup()
        second = comm.dup()
        if context.incarnation:
            with pytest.raises(ftcomm.Unsupported, match=r"split\(\) of 'world' .* not admitted yet"):
                comm.split(0)
            comm.job.join_wait().wait()
        else:
            if comm.rank == 1:
                context.die()
            while comm.all_reduce(np.ones(100)).contributors != (0,):
                pass
            context.mark("without")
            asked.wait()
            comm.job.admit().wait()
        sums = np.ones(2)
        return [one.all_reduce(sums).contributors for one in (first, second)], sums.tolist()

    group = ranks.start(2, run, policy="lossy", heartbeat=0.5)
    group.wait_for(0, "without")
    group.spawn(1, run, incarnation=1)
    results = [result.value for result in group.results() if result.value is not None]
    assert results == [([(0, 1), (0, 1)], [4.0, 4.0])] * 2
