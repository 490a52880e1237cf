"""Ranks of one host that share its processors: sums of middle size go along a tree, and the fence is one rank's word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collective_values import every_collective, those_left_have_the_same_sum
from harness import Ranks
from processors import on_one_processor

import ftcomm

Comm = ftcomm.Communicator


@pytest.fixture(autouse=True)
def one_processor() -> Iterator[None]:
    with on_one_processor():
        yield


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
    """Whoever of them was through."""
    those_left_have_the_same_sum(ranks, 5, count, victim, point)
