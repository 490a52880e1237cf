"""Large messages that their receiver reads out of the sender's memory, and small ones that go in pieces."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks
from tables import most

import ftcomm

Comm = ftcomm.Communicator

PIECE, EAGER = 16 << 10, 64 << 10  # bytes: of a small message in one frame, and of the largest small one
READ = 4 << 20  # at a time
SIZES = (0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, EAGER - 1, EAGER, EAGER + 1, READ, 2 * READ + 12_345)


def message(number: int, size: int) -> np.ndarray[Any, Any]:
    return ((np.arange(size) * 31 + number) % 251).astype(np.uint8)


@pytest.mark.parametrize("waits", [False, True], ids=["sent first", "awaited"])
@pytest.mark.parametrize("memory", ["0", "1"])
def test_values(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, memory: str, waits: bool) -> None:
    """In the order in which they were sent, whether or not the receiver was there before them."""
    monkeypatch.setenv("FTCOMM_PEER_MEMORY", memory)

    def run(comm: Comm) -> None:
        if comm.rank == 0:
            if waits:
                comm.barrier()
            requests = [comm.isend(message(number, size), 1) for number, size in enumerate(SIZES)]
            if not waits:
                comm.barrier()
            for request in requests:
                request.wait()
            return
        got = [np.zeros(size, np.uint8) for size in SIZES]
        requests = [comm.irecv(buf, 0) for buf in got] if waits else []
        comm.barrier()
        requests = requests or [comm.irecv(buf, 0) for buf in got]
        for number, (request, buf) in enumerate(zip(requests, got, strict=True)):
            request.wait()
            assert (request.nbytes, request.source) == (buf.nbytes, 0)
            np.testing.assert_array_equal(buf, message(number, buf.size))

    ranks(2, run)


@pytest.mark.parametrize("size", [PIECE, EAGER, EAGER + 1, 3 * READ])
def test_too_long_ones_cost_only_themselves(ranks: Ranks, size: int) -> None:
    def run(comm: Comm) -> None:
        if comm.rank == 0:
            for number in range(4):
                comm.send(message(number, size), 1)
            return
        got, short = np.zeros(size, np.uint8), np.zeros(size - 1, np.uint8)
        early = [comm.irecv(short, 0), comm.irecv(got, 0)]
        with pytest.raises(ftcomm.Truncated):
            early[0].wait()
        early[1].wait()
        np.testing.assert_array_equal(got, message(1, size))
        comm.irecv(np.zeros(1), 0, tag=9)
        with pytest.raises(ftcomm.Truncated):
            comm.recv(short, 0)
        comm.recv(got, ftcomm.ANY)
        np.testing.assert_array_equal(got, message(3, size))

    ranks(2, run)


def test_all_to_one_and_both_ways(ranks: Ranks) -> None:
    """Several senders at once, receives from ANY, and every rank reading while it is read."""

    def run(comm: Comm) -> None:
        me, n = comm.rank, comm.size
        sizes = (EAGER, EAGER + 1, READ + 5)
        sent = [comm.isend(message(me, size), to, tag) for to in range(n) if to != me for tag, size in enumerate(sizes)]
        for tag, size in enumerate(sizes):
            seen = set()
            for _ in range(n - 1):
                got = np.zeros(size, np.uint8)
                source = comm.recv(got, ftcomm.ANY, tag)
                np.testing.assert_array_equal(got, message(source, size))
                seen.add(source)
            assert seen == set(range(n)) - {me}
        for request in sent:
            request.wait()

    ranks(4, run)


def test_a_send_that_was_given_up_is_not_received(ranks: Ranks) -> None:
    """Its buffer is the caller's again; the receiver, which comes then, gets the next message."""

    def run(comm: Comm, context: Context) -> None:
        data = message(1, READ)
        if comm.rank == 0:
            with pytest.raises(ftcomm.Timeout):
                comm.send(data, 1)
            data[:] = message(2, READ)
            context.mark("given up")
            comm.send(data, 1)
        else:
            context.hold()
            comm.recv(data, 0)
            np.testing.assert_array_equal(data, message(2, READ))

    group = ranks.start(2, run, timeout=1.0)
    group.wait_for(0, "given up")
    group.release(1)
    for result in group.results():
        assert result.ok, result.text()


def test_the_kernel_refuses(ranks: Ranks) -> None:
    """It goes through the segment then."""

    def run(comm: Comm) -> None:
        for number in range(3):
            got = message(number, 2 * READ)
            if comm.rank == 0:
                comm.send(got, 1)
            else:
                got[:] = 0
                comm.recv(got, 0)
                np.testing.assert_array_equal(got, message(number, 2 * READ))

    ranks(2, run, faults="rank=1,at=shm.read:2,do=corrupt")


def test_one_rank_does_not_take_part(ranks: Ranks) -> None:
    def start(group: Group, context: Context) -> None:
        os.environ["FTCOMM_PEER_MEMORY"] = str(context.rank)
        comm = ftcomm.init(context.rank, group.size, store=group.store(), job=group.job, options=group.options)
        got = np.zeros(READ, np.uint8)
        sending = comm.isend(message(comm.rank, READ), 1 - comm.rank)
        comm.recv(got, 1 - comm.rank)
        sending.wait()
        np.testing.assert_array_equal(got, message(1 - comm.rank, READ))
        comm.leave()

    for result in ranks.start(2, start, direct=False).results():
        assert result.ok, result.text()


@pytest.mark.parametrize("from_any", most([True], [False]))
@pytest.mark.parametrize(
    ("victim", "point"), [(0, "p2p.rts"), (1, "p2p.cts"), (1, "p2p.read"), (1, "p2p.read:2"), (1, "p2p.received")]
)
@pytest.mark.sample(2)
def test_a_death_in_it(ranks: Ranks, victim: int, point: str, from_any: bool) -> None:
    """The other side is told, unless all of it had been read; between others messages go on."""

    def run(comm: Comm, context: Context) -> str:
        data = message(7, 2 * READ)
        text = "done"
        try:
            if comm.rank == 0:
                comm.send(data, 1)
            elif comm.rank == 1:
                comm.recv(data, ftcomm.ANY if from_any else 0)
        except ftcomm.PeerFailure as error:
            text = str(error)
        comm = comm.shrink()
        if comm.rank == 0:
            comm.send(data, 1)
        else:
            data[:] = 0
            comm.recv(data, 0)
        np.testing.assert_array_equal(data, message(7, 2 * READ))
        return text

    results = ranks.start(3, run, faults=f"rank={victim},at={point},do=kill").results()
    for rank, result in enumerate(results):
        if rank == victim:
            assert result.status == -9, result.text()
        else:
            assert result.ok, result.text()
    told = results[1 - victim].value
    if point == "p2p.received" or (point == "p2p.rts" and told == "done"):  # it may be read while its sender dies
        assert told == "done"
    else:
        assert f"rank {victim} is gone" in told, told


@pytest.mark.parametrize("point", ["shm.read", "shm.read:2", "shm.read:3", "p2p.read:2"])
def test_a_late_reader_takes_nothing_of_what_comes_after(ranks: Ranks, point: str) -> None:
    """C9: it stops in the middle of it, is voted out, and wakes up when the sender's buffer holds other things."""

    def run(comm: Comm, context: Context) -> str:
        size = 3 * READ
        try:
            if comm.rank == 0:
                data = message(1, size)
                with pytest.raises(ftcomm.PeerFailure):
                    comm.send(data, 1)
                data[:] = 0xEE
                context.mark("filled")
                context.hold()
                return "failed"
            got = np.zeros(size, np.uint8)
            comm.recv(got, 0)
            return "received"
        except ftcomm.StaleEpoch:
            return "stale"
        finally:
            context.mark("returned")

    group = ranks.start(2, run, policy="lossy", heartbeat=0.5, faults=f"rank=1,at={point},do=stop:60")
    group.wake_late(1, {0})
    values = [result.value if result.ok else result.text() for result in group.results()]
    assert values == ["failed", "stale"]
