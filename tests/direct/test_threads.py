"""A process in which no thread can be started any more: a container's limit, or one of its memory."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks

import ftcomm


def no_more() -> None:
    """From now on there is no room for a thread's stack."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (2 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for _ in range(1000):  # the C library keeps stacks of threads that have ended, also of the parent's
        try:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        except RuntimeError:
            return
    raise AssertionError("threads can be started still")


def test_at_the_start(ranks: Ranks) -> None:
    def run(group: Group, context: Context) -> str:
        store = group.store()
        if context.rank == 1:
            no_more()
        with pytest.raises(ftcomm.Error) as caught:
            ftcomm.init(context.rank, 2, store=store, job=group.job, options=group.options)
        return str(caught.value)

    other, own = ranks(2, run, direct=False)
    assert "could not be started" in own
    assert "ulimit -u" in own
    assert "Rank 1 failed at the start of the job: the thread" in other


def test_after_the_start_none_is_needed(ranks: Ranks) -> None:
    """What is told of a death, and the outcomes of requests, come by a thread that is there already."""

    def run(comm: ftcomm.Communicator, context: Context) -> Any:
        heard: list[str] = []
        if context.rank == 1:
            context.hold()
        no_more()
        comm.job.add_listener(lambda event: heard.append(event["event"]))
        context.mark("ready")
        word = np.ones(2)
        outcome = comm.all_reduce(word)
        comm.barrier()
        comm.leave()  # by then all events have been told
        return outcome.contributors, word.tolist(), bool(heard)

    group = ranks.start(3, run, policy="lossy")
    for rank in (0, 2):
        group.wait_for(rank, "ready")
    group.kill(1)
    assert Ranks.values(group, {1})[::2] == [((0, 2), [2.0, 2.0], True)] * 2
