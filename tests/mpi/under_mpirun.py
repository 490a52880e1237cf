"""Run by pytest-mpi on every rank: ``mpirun --with-ft ulfm -n 4 pytest --with-mpi tests/mpi/under_mpirun.py``.

Here pytest-mpi has imported MPI before ftcomm, and MPI is used beside it: each result is compared with Open MPI's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import ftcomm

MPI = pytest.importorskip("mpi4py.MPI")
pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(scope="module")
def comm() -> Iterator[ftcomm.Communicator]:
    made = ftcomm.init(timeout=60)
    yield made
    made.leave()


def test_ranks_are_mpis(comm: ftcomm.Communicator) -> None:
    assert (comm.rank, comm.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert comm.job.name.startswith("mpi-")


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_all_reduce_is_mpis(comm: ftcomm.Communicator, dtype: str, count: int) -> None:
    data = ((np.arange(count) + comm.rank) % 100).astype(dtype)  # sums are exact in every order
    expected = np.empty_like(data)
    MPI.COMM_WORLD.Allreduce(data, expected)
    comm.all_reduce(data)
    np.testing.assert_array_equal(data, expected)


def test_split_is_mpis(comm: ftcomm.Communicator) -> None:
    color, key = comm.rank % 2, -comm.rank
    theirs, ours = MPI.COMM_WORLD.Split(color, key), comm.split(color, key)
    assert ours is not None
    assert (ours.rank, ours.size) == (theirs.rank, theirs.size)
    assert [ours.slots[i] for i in range(ours.size)] == theirs.allgather(comm.rank)
    theirs.Free()


def test_ring_of_messages(comm: ftcomm.Communicator) -> None:
    data, got = np.full(1000, comm.rank), np.zeros(1000, np.int64)
    request = comm.isend(data, (comm.rank + 1) % comm.size)
    assert comm.recv(got, (comm.rank - 1) % comm.size) == (comm.rank - 1) % comm.size
    request.wait()
    assert (got == (comm.rank - 1) % comm.size).all()


def test_init_again(comm: ftcomm.Communicator) -> None:
    again = ftcomm.init(job="again", timeout=60)
    assert again.all_reduce(np.ones(3)).contributors == tuple(range(comm.size))
    again.leave()
