"""Where a container takes things away, the library falls back, says so, and a death is noticed all the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sandbox
from harness import Context, Group, Ranks

import ftcomm


def lose_one(ranks: Ranks, prepare: Callable[[int], None], heartbeat: float = 20.0, **options: Any) -> list[Any]:
    """Four ranks, of which 1 is killed; (evidence, transports, what the log said) of the others."""

    def run(group: Group, context: Context) -> Any:
        prepare(context.rank)
        comm = ftcomm.init(context.rank, 4, store=group.store(), job=group.job, options=group.options, timeout=30)
        links = comm.job.info()["links"]
        comm.all_reduce(np.ones(50_000))
        if comm.rank == 1:
            context.die()
        with pytest.raises(ftcomm.PeerFailure) as failure:
            while True:
                comm.all_reduce(np.ones(50_000))
        comm = comm.shrink()
        data = np.ones(10)
        comm.all_reduce(data)
        comm.leave()
        return str(failure.value.evidence), links, float(data[0])

    group = ranks.start(4, run, direct=False, heartbeat=heartbeat, **options)
    values = ranks.values(group, dies={1})
    del values[1]
    assert all(total == 3.0 for _, _, total in values)
    return values


@pytest.mark.parametrize(
    ("missing", "heartbeat", "evidence"),
    [
        (["pidfd_open"], 20.0, "robust_futex"),
        (["futex_waitv"], 20.0, "robust_futex pidfd"),  # whichever comes first
        (["pidfd_open", "futex_waitv", "process_vm_readv"], 20.0, "robust_futex"),
        (["set_robust_list"], 20.0, "pidfd"),
        (["set_robust_list", "pidfd_open"], 1.0, "heartbeat"),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, list) else None,
)
def test_without_system_calls(ranks: Ranks, missing: list[str], heartbeat: float, evidence: str) -> None:
    for seen, links, _ in lose_one(ranks, lambda rank: sandbox.forbid(*missing), heartbeat):
        assert any(one in seen.replace("-", "_") for one in evidence.split()), seen
        assert links.count("shm") == 3


def test_without_memfd_it_is_tcp(ranks: Ranks) -> None:
    for _, links, _ in lose_one(ranks, lambda rank: sandbox.forbid("memfd_create"), heartbeat=1.0):
        assert links.count("tcp") == 3


def test_one_rank_without_memfd(ranks: Ranks) -> None:
    """It gets the segment from another rank."""
    for _, links, _ in lose_one(ranks, lambda rank: sandbox.forbid("memfd_create") if rank == 2 else None):
        assert links.count("shm") == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to make process namespaces (root)")
def test_ranks_that_do_not_see_each_others_processes(ranks: Ranks) -> None:
    for seen, links, _ in lose_one(ranks, lambda rank: sandbox.own_process_numbers()):
        assert "robust_futex" in seen.replace("-", "_"), seen
        assert links.count("shm") == 3


@pytest.mark.usefixtures("pulls")
@pytest.mark.parametrize("policy", ["raise", "lossy"])
def test_one_rank_may_not_read_any_more(ranks: Ranks, policy: str) -> None:
    """A filter that the program has taken on after the start, which says that there is no such system call."""

    def run(comm: ftcomm.Communicator, context: Context) -> bool:
        if comm.rank == 1:
            sandbox.forbid("process_vm_readv")
        for turn in range(3):
            data = np.full(100_000, comm.rank + turn, np.float64)
            comm.all_reduce(data)
            assert (data == 3 + 3 * turn).all()
        return bool(comm.stats()["reads_refused"])

    for result in ranks.start(3, run, policy=policy, timeout=20.0).results():
        assert result.ok, result.text()
        assert result.value is True
