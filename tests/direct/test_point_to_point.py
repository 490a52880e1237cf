"""send and recv: order, tags, any source, lengths, large messages."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Ranks

import ftcomm


def test_ping_pong_of_all_sizes(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        other = 1 - comm.rank
        for count in (0, 1, 1000, 65_536, 1_000_003):
            data = np.arange(count, dtype=np.float64)
            got = np.zeros(count)
            if comm.rank == 0:
                comm.send(data, other)
                assert comm.recv(got, other) == other
            else:
                assert comm.recv(got, other) == other
                comm.send(got, other)
            np.testing.assert_array_equal(got, data)

    ranks(2, run, transport=transport)


def test_order_and_tags(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        if comm.rank == 0:
            for i in range(50):
                comm.send(np.array([i]), 1, tag=i % 2)
        else:
            got = np.zeros(1, np.int64)
            for tag in (1, 0):
                for i in range(tag, 50, 2):
                    comm.recv(got, 0, tag)
                    assert got[0] == i

    ranks(2, run, transport=transport)


def test_any_source(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        if comm.rank:
            comm.send(np.full(3, comm.rank), 0)
            return
        seen = set()
        for _ in range(comm.size - 1):
            got = np.zeros(3, np.int64)
            source = comm.recv(got)
            assert got.tolist() == [source] * 3
            seen.add(source)
        assert seen == {1, 2, 3}

    ranks(4, run, transport=transport)


def test_shorter_and_longer_than_the_buffer(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        if comm.rank == 0:
            comm.send(b"abc", 1)
            comm.send(b"too long", 1)
            comm.send(b"next", 1)
            return
        buf = bytearray(5)
        request = comm.irecv(buf, 0)
        request.wait()
        assert (bytes(buf), request.nbytes, request.source) == (b"abc\0\0", 3, 0)
        with pytest.raises(ftcomm.Truncated):
            comm.recv(buf, 0)
        comm.recv(buf, 0)
        assert bytes(buf).startswith(b"next")

    ranks(2, run, transport=transport)


def test_both_send_first(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        other = 1 - comm.rank
        got = np.zeros(3_000_000, np.float32)
        sending = comm.isend(np.full_like(got, comm.rank + 1), other)
        comm.recv(got, other)
        sending.wait()
        assert (got == other + 1).all()

    ranks(2, run, transport=transport)


def test_dropped_request_goes_on(ranks: Ranks) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        if comm.rank == 0:
            comm.isend(np.arange(500_000), 1)  # neither the request nor the array is kept
            comm.barrier()
        else:
            got = np.zeros(500_000, np.int64)
            comm.recv(got, 0)
            np.testing.assert_array_equal(got, np.arange(500_000))
            comm.barrier()

    ranks(2, run)


def test_alone(ranks: Ranks) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        got = np.zeros(3)
        request = comm.irecv(got, 0)
        comm.send(np.arange(3.0), 0)
        request.wait()
        assert got.tolist() == [0, 1, 2]

    ranks(1, run)
