"""Ranks of one host that share its processors: sums of middle size go along a tree, and the fence is one rank's word."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from collective_values import every_collective
from harness import Ranks

import ftcomm

Comm = ftcomm.Communicator


@pytest.fixture(autouse=True)
def one_processor() -> Iterator[None]:
    """For this process, and so for all ranks that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("size", "variable", "value"),
    [
        (2, "FTCOMM_PEER_MEMORY", "1"),
        (3, "FTCOMM_STREAM_LIMIT", "16384"),
        (5, "FTCOMM_STREAM_LIMIT", "16384"),
        (5, "FTCOMM_PEER_MEMORY", "0"),  # along the tree all the same; what is larger goes round the ring
    ],
)
def test_every_collective(ranks: Ranks, size: int, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)

    def run(comm: Comm) -> bool:
        every_collective(comm, (1_023, 4_099, 16_000, 20_001))
        return bool(comm.stats()["crowded"])

    assert ranks(size, run) == [True] * size


def test_hosts_are_not_crowded(ranks: Ranks) -> None:
    """A word to one rank, which answers all, would go from host to host."""
    assert ranks(4, lambda comm: comm.stats()["crowded"], transport="hosts") == [False] * 4


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("count", "point"),
    [(16_000, "flat.send"), (16_000, "flat.done"), (1_500_000, "fence.before"), (1_500_000, "fence.round")],
)
def test_a_death(ranks: Ranks, count: int, point: str, victim: int) -> None:
    """Those left have the same, whoever of them was through."""
    size = 5

    def run(comm: Comm) -> list[tuple[tuple[int, ...], list[float]]]:
        data = np.full(count, 1.0 + comm.rank, np.float32)
        parts = comm.all_reduce(data).chunks
        return [(who, sorted({float(x) for x in data[at : at + n]})) for at, n, who in parts]

    results = ranks(size, run, policy="lossy", dies=[victim], faults=f"rank={victim},at={point},do=kill")
    left = [r for rank, r in enumerate(results) if rank != victim]
    assert left == [left[0]] * (size - 1)
    for who, values in left[0]:
        assert values == [float(sum(1 + rank for rank in who))]
