"""Several communicators at once: split, dup, shrink of shrunk, threads, closing."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks

import ftcomm

Comm = ftcomm.Communicator


def sum_of_ranks(comm: Comm) -> float:
    buf = np.full(100, comm.rank + 1.0)
    comm.all_reduce(buf)
    return float(buf[0])


def test_split(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm) -> Any:
        part = comm.split(comm.rank % 2, key=-comm.rank)
        assert part is not None
        assert sum_of_ranks(part) == (6 if comm.rank % 2 == 0 else 3)
        gathered = np.zeros(part.size, np.int64)
        part.all_gather(gathered, np.array([comm.rank]))
        none = comm.split(None if comm.rank == 0 else 7)
        assert (none is None) == (comm.rank == 0)
        again = part.split(0)
        assert again is not None
        assert again.id != part.id
        assert sum_of_ranks(again) == sum_of_ranks(part)
        return gathered.tolist(), part.slots

    assert ranks(5, run, transport=transport) == [([4, 2, 0], (4, 2, 0)), ([3, 1], (3, 1))] * 2 + [
        ([4, 2, 0], (4, 2, 0))
    ]


def test_dup_has_operations_of_its_own(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm) -> None:
        copy = comm.dup()
        third = copy.dup(policy="lossy")
        assert (copy.slots, third.policy) == (comm.slots, "lossy")
        a, b = np.full(1000, comm.rank + 1.0), np.full(200_000, comm.rank + 2.0)
        first, second = (comm, copy) if comm.rank % 2 else (copy, comm)
        buffers = {id(comm): a, id(copy): b}
        requests = [c.iall_reduce(buffers[id(c)]) for c in (first, second)]  # in another order on odd ranks
        for request in requests:
            request.wait()
        assert (a[0], b[0]) == (6, 9)
        assert sum_of_ranks(third) == 6

    ranks(3, run, transport=transport)


def test_communicators_in_threads(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        comms = [comm.dup() for _ in range(4)]
        seen: list[list[float]] = [[] for _ in comms]

        def work(number: int) -> None:
            seen[number] = [sum_of_ranks(comms[number]) for _ in range(50)]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [[6.0] * 50] * 4

    ranks(3, run)


def test_close(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        copy = comm.dup()
        with copy:
            assert sum_of_ranks(copy) == 3
        with pytest.raises(ftcomm.Error, match="clos"):
            copy.barrier()
        copy.close()
        assert sum_of_ranks(comm) == 3
        comm.leave()
        with pytest.raises(ftcomm.Closed, match="closed"):
            comm.barrier()
        comm.leave()
        assert not ftcomm.is_initialized()

    ranks(2, run)


def test_shrink_without_failure_and_twice(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm) -> None:
        first = comm.shrink()
        second = comm.shrink()
        third = second.shrink()
        assert len({comm.id, first.id, second.id, third.id}) == 4
        for one in (third, first, comm, second):
            assert (one.size, sum_of_ranks(one)) == (3, 6)

    ranks(3, run, transport=transport)


def test_alone(ranks: Ranks) -> None:
    def run(comm: Comm) -> None:
        data = np.arange(5.0)
        for call in (comm.all_reduce, comm.broadcast, comm.reduce):
            assert call(data).contributors == (0,)
        assert data.tolist() == [0, 1, 2, 3, 4]
        out = np.zeros(5)
        for name in ("all_gather", "reduce_scatter", "scatter", "all_to_all"):
            out[:] = 0
            getattr(comm, name)(out, data)
            assert out.tolist() == data.tolist(), name
        comm.gather(data, out)
        comm.barrier()
        assert comm.agree(5) == 5
        assert comm.shrink().size == 1
        assert (comm.alive, comm.failed(), comm.revoked) == ((0,), (), False)

    ranks(1, run)


def test_stats_and_queries(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm) -> None:
        before = comm.stats()["operations"]
        comm.barrier()
        stats = comm.stats()
        assert stats["operations"] == before + 1
        assert stats["communicator"] == "world"
        assert transport in str(stats)
        assert (comm.job.alive(), comm.job.waiting(), comm.job.stale) == ((0, 1), (), False)
        assert repr(comm) == f"<ftcomm.Communicator 'world' rank {comm.rank} of 2>"

    ranks(2, run, transport=transport)


def test_forked_child_can_not_use_it(ranks: Ranks, transport: str) -> None:
    """It says so; it neither hides its parent's death nor keeps a descriptor of the job open."""

    def run(comm: Comm, context: Context) -> Any:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with pytest.raises(ftcomm.Closed, match="forked|parent"):
                    comm.barrier()
                with pytest.raises(ftcomm.Closed, match="forked|parent"):
                    comm.epoch  # noqa: B018
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert sum_of_ranks(comm) == 6
        if comm.rank == 1:
            read, write = os.pipe()
            if os.fork() == 0:  # outlives its parent until the test's own end of the pipe closes
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            context.die()
        with pytest.raises(ftcomm.PeerFailure) as caught:
            while True:
                comm.barrier()
        return caught.value.ranks

    values = ranks(3, run, dies={1}, transport=transport)
    assert values[0] == values[2] == (1,)
