"""Large all-reduces over several hosts, two ranks on each: values, bits, deaths of each role."""

from __future__ import annotations

from functools import partial
from typing import Any

import collective_values
import kill_table as table
import ml_dtypes
import numpy as np
import pytest
from harness import Context, Ranks
from tables import most

import ftcomm

Comm = ftcomm.Communicator

pytestmark = pytest.mark.usefixtures("pulls")


whole = partial(collective_values.whole, least=1)


@pytest.mark.parametrize("size", most([3, 5], [4, 8]))
def test_values(ranks: Ranks, size: int) -> None:
    def run(comm: Comm, _: Context) -> None:
        me, n = comm.rank, comm.size
        for count in (20_001, 100_000, 400_003):
            total = sum(whole(r, count, np.float64) for r in range(n))
            for dtype in (np.float32, np.int8, np.int64, np.complex64, ml_dtypes.bfloat16):
                data = whole(me, count, dtype)
                comm.all_reduce(data)
                np.testing.assert_array_equal(data.astype(np.complex128), total.astype(dtype).astype(np.complex128))
            average = whole(me, count, np.float32)
            comm.all_reduce(average, "avg")
            np.testing.assert_array_equal(average, (total.astype(np.float32) / np.float32(n)))
            largest = whole(me, count, np.int32)
            comm.all_reduce(largest, "max")
            np.testing.assert_array_equal(largest, np.max([whole(r, count, np.int32) for r in range(n)], axis=0))

    for result in ranks.start(size, run, transport="hosts").results():
        assert result.ok, result.text()


def test_bits_are_equal_and_repeat(ranks: Ranks) -> None:
    def run(comm: Comm, _: Context) -> set[bytes]:
        seen = set()
        for _turn in range(5):
            data = np.random.default_rng(comm.rank).standard_normal(500_000).astype(np.float32)
            comm.all_reduce(data)
            seen.add(data.tobytes())
        return seen

    values = [result.value for result in ranks.start(5, run, transport="hosts").results()]
    assert all(value == values[0] for value in values)
    assert len(values[0]) == 1


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("point", ["group.sum:3", "group.owner:2", "group.final:2", "group.fetch:3"])
@pytest.mark.sample(4)
def test_killed_in_it(ranks: Ranks, point: str, victim: int) -> None:
    """A delegate, an owner, and who only reads, between two of their segments; the very operation is repaired."""

    def run(comm: Comm, _: Context) -> Any:
        return table.lossy_rounds(comm, 0, 4)

    faults = f"rank={victim},at={point},do=kill"
    group = ranks.start(4, run, faults=faults, heartbeat=table.HEARTBEAT, policy="lossy", transport="hosts")
    results = group.results(120)
    assert [r.rank for r in results if r.status == -9] == [victim], table.text_of(results)
    alive = [r for r in results if r.rank != victim]
    assert all(r.ok for r in alive), table.text_of(results)
    assert len({str(r.value) for r in alive}) == 1, table.text_of(results)


def test_lone_hosts_take_the_ring(ranks: Ranks) -> None:
    """Nobody has a fellow: what all find out only when all have entered."""

    def run(comm: Comm, _: Context) -> Any:
        return [table.work(comm, round) for round in range(3)]

    values = [result.value for result in ranks.start(3, run, transport="tcp").results()]
    assert values[0] == values[1] == values[2]
