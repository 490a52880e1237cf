"""A rank is killed, stopped or cut off: what the others see, and that they go on."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks

import ftcomm

Comm = ftcomm.Communicator


def failure_of(comm: Comm, buf: Any = None) -> tuple[Any, ...]:
    """The failure that repeated all-reduces run into, as comparable fields."""
    with pytest.raises(ftcomm.PeerFailure) as caught:
        while True:
            comm.all_reduce(np.ones(1000) if buf is None else buf)
    error = caught.value
    return type(error).__name__, error.ranks, error.operation, error.epoch


def sum_of_ranks(comm: Comm, count: int = 1000) -> float:
    buf = np.full(count, comm.rank + 1.0)
    comm.all_reduce(buf)
    assert (buf == buf[0]).all()
    return float(buf[0])


def test_a_fault_that_never_came_is_told(ranks: Ranks) -> None:
    """A rank that lives because nobody killed it is not to look like one that survived."""

    def run(comm: Comm) -> float:
        return sum_of_ranks(comm)

    group = ranks.start(2, run, faults="rank=1,at=vote.send,do=kill; rank=0,at=leave.send,do=delay:1")
    results = group.results()
    assert all(result.ok for result in results), "\n".join(result.text() for result in results)
    assert "fault" not in results[0].log
    assert "rank 1: fault at vote.send:1 was never reached (passed 0 times)" in results[1].log


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("count", [10, 300_000])
@pytest.mark.sample(4)
def test_killed_rank_raises_on_all_then_shrink(ranks: Ranks, transport: str, victim: int, count: int) -> None:
    def run(comm: Comm, context: Context) -> Any:
        for step in range(100):
            if step == 5 and comm.rank == victim:
                context.die()
            try:
                comm.all_reduce(np.ones(count))
            except ftcomm.PeerFailure as error:
                seen = (error.ranks, error.operation, error.epoch)
                assert error.evidence
                assert f"{victim}" in str(error)
                break
        else:
            raise AssertionError("nobody noticed")
        assert comm.failed() == (victim,)
        smaller = comm.shrink()
        assert (smaller.size, smaller.alive) == (3, (0, 1, 2))
        assert sum_of_ranks(smaller) == 6
        return seen, smaller.slots, smaller.id

    values = ranks(4, run, dies={victim}, transport=transport)
    survivors = [values[r] for r in range(4) if r != victim]
    assert survivors[0] == survivors[1] == survivors[2]
    assert survivors[0][0][0] == (victim,)
    assert survivors[0][1] == tuple(r for r in range(4) if r != victim)


def test_two_then_three_of_four(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> int:
        if comm.rank in (1, 2):
            context.die()
        failure_of(comm)
        pair = comm.shrink()
        while pair.size > 2:  # the second death may become known after the first shrink
            failure_of(pair)
            pair = pair.shrink()
        assert sum_of_ranks(pair) == 3
        if comm.rank == 3:
            context.die()
        failure_of(pair)
        alone = pair.shrink()
        assert sum_of_ranks(alone) == 1
        return alone.size

    assert ranks(4, run, dies={1, 2, 3}, transport=transport)[0] == 1


def test_lossy_goes_on_with_the_others(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> Any:
        contributors = []
        for step in range(20):
            if step == 5 and comm.rank == 2:
                context.die()
            buf = np.full(50_000, comm.rank + 1.0)
            outcome = comm.all_reduce(buf, "avg")
            present = outcome.contributors
            for offset, count, who in outcome.chunks:
                expected = sum(r + 1 for r in who) / len(who)
                np.testing.assert_allclose(buf[offset : offset + count], expected)
            contributors.append(present)
        assert (comm.size, comm.alive) == (4, (0, 1, 3))
        return contributors

    values = ranks(4, run, dies={2}, policy="lossy", transport=transport)
    assert values[0] == values[1] == values[3]
    assert values[0][0] == (0, 1, 2, 3)
    assert values[0][-1] == (0, 1, 3)


def test_lossy_is_bitwise_the_same_on_all(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> bytes:
        buf = np.random.default_rng(comm.rank).standard_normal(100_000).astype(np.float32)
        for step in range(10):
            if step == 3 and comm.rank == 1:
                context.die()
            comm.all_reduce(buf, "avg")
            buf += comm.rank * np.float32(0.1)
        comm.all_reduce(buf)
        return buf.tobytes()

    values = ranks(4, run, dies={1}, policy="lossy", transport=transport)
    assert values[0] == values[2] == values[3]


def test_kill_in_mid_operation(ranks: Ranks, transport: str) -> None:
    """The victim is in a large all-reduce, not between two."""

    def run(comm: Comm, context: Context) -> Any:
        request = comm.iall_reduce(np.ones(8_000_000, np.float32)) if comm.rank else None
        context.mark("posted")
        context.hold()
        if request is None:
            request = comm.iall_reduce(np.ones(8_000_000, np.float32))
        with pytest.raises(ftcomm.PeerFailure) as caught:
            request.wait()
        return caught.value.ranks, sum_of_ranks(comm.shrink())

    group = ranks.start(3, run, transport=transport)
    for rank in range(3):
        group.wait_for(rank, "posted")
    group.kill(2)
    group.release(0)
    group.release(1)
    assert Ranks.values(group, {2})[:2] == [((2,), 3.0)] * 2


@pytest.mark.parametrize(
    "where",
    [{"transport": "shm"}, {"transport": "tcp"}, {"transport": "tcp", "host": "one"}],
    ids=["shm", "tcp", "tcp on one host"],
)
def test_receive_from_the_dead(ranks: Ranks, where: dict[str, str]) -> None:
    def run(comm: Comm, context: Context) -> None:
        if comm.rank == 1:
            comm.send(np.full(3, 5.0), 0)
            context.mark("sent")
            context.hold()
        elif comm.rank == 0:
            buf = np.zeros(3)
            assert comm.recv(buf, 1) == 1
            with pytest.raises(ftcomm.PeerFailure) as caught:
                comm.recv(buf, 1)
            assert caught.value.ranks == (1,)
            pending = comm.irecv(buf)  # from any: pending until the death is acknowledged
            assert comm.failed() == (1,)
            comm.ack_failed()
            context.mark("acknowledged")
            assert pending.wait().contributors is not None
            assert pending.source == 2
        else:
            context.hold()
            comm.send(np.full(3, 7.0), 0)

    group = ranks.start(3, run, **where)
    group.wait_for(1, "sent")
    group.kill(1)
    group.wait_for(0, "acknowledged")
    group.release(2)
    Ranks.values(group, {1})


def test_receive_from_anyone_when_ranks_leave_and_die(ranks: Ranks, transport: str) -> None:
    """Who leaves in good order is no failure to a receive from ANY, who is killed is one; it ends when nobody is left."""

    def run(comm: Comm, context: Context) -> None:
        if comm.rank > 0:
            context.mark("there")
            context.hold()
            if comm.rank == 3:
                comm.send(np.full(3, 7.0), 0)
            return
        buf, unused = np.zeros(3), np.zeros(3)

        def gone(rank: int) -> tuple[int, ...]:  # returns when this rank knows of it
            with pytest.raises(ftcomm.PeerFailure) as caught:
                comm.recv(unused, rank)
            return caught.value.ranks

        pending = comm.irecv(buf)
        context.mark("posted")
        assert gone(1) == (1,)
        with pytest.raises(ftcomm.Timeout):
            pending.wait(timeout=0)
        late = comm.irecv(unused, tag=1)  # posted after the leave: no difference
        with pytest.raises(ftcomm.Timeout):
            late.wait(timeout=0)
        context.mark("left")
        assert gone(2) == (2,)
        for request in (pending, late):
            with pytest.raises(ftcomm.PeerFailure) as caught:
                request.wait()
            assert caught.value.ranks == (2,)
            assert request.error is None  # pending
        with pytest.raises(ftcomm.PeerFailure) as caught:
            comm.recv(unused)
        assert caught.value.ranks == (2,)
        assert comm.failed() == (1, 2)
        comm.ack_failed()
        context.mark("acknowledged")
        pending.wait()
        assert (pending.source, buf[0]) == (3, 7.0)
        for receive in (late.wait, lambda: comm.recv(unused), comm.irecv(unused).wait):
            with pytest.raises(ftcomm.PeerFailure, match="nobody is left who could send") as caught:
                receive()
            assert caught.value.ranks == (1, 2, 3)
        assert late.error is not None
        itself = comm.irecv(buf, 0)
        comm.send(np.full(3, 8.0), 0)
        itself.wait()
        assert buf[0] == 8.0

    group = ranks.start(4, run, transport=transport)
    for rank in (1, 2, 3):
        group.wait_for(rank, "there")
    group.wait_for(0, "posted")
    group.release(1)
    group.wait_for(0, "left")
    group.kill(2)
    group.wait_for(0, "acknowledged")
    group.release(3)
    Ranks.values(group, {2})


def test_agree_reports_what_is_not_acknowledged(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> Any:
        if comm.rank == 1:
            context.die()
        with pytest.raises(ftcomm.PeerFailure) as caught:
            (request := comm.iagree(0b1110 | comm.rank)).wait()
        assert request.value == caught.value.value
        first = (caught.value.ranks, caught.value.value)
        comm.ack_failed()
        return first, comm.agree(0b0110 + 8 * comm.rank)

    values = ranks(3, run, dies={1}, transport=transport)
    assert values[0] == values[2] == (((1,), 0b1110 & 0b1110), 0b0110)


def test_agree_without_failure(ranks: Ranks, transport: str) -> None:
    values = ranks(3, lambda comm: [comm.agree(f) for f in (7 << comm.rank, -1, comm.rank)], transport=transport)
    assert values == [[7 & 14 & 28, -1, 0]] * 3


def test_revoke(ranks: Ranks, transport: str) -> None:
    """One caller ends a pending operation of everybody; agree and shrink still work; dup'ed communicators do not notice."""

    def run(comm: Comm, context: Context) -> None:
        other = comm.dup()
        if comm.rank == 1:
            comm.revoke()
        with pytest.raises(ftcomm.Revoked):
            while True:
                comm.all_reduce(np.ones(10))
        assert comm.revoked
        for call in (comm.barrier, lambda: comm.send(b"x", 0), lambda: comm.recv(bytearray(1), 0)):
            with pytest.raises(ftcomm.Revoked):
                call()
        assert comm.agree(comm.rank + 4) == 4
        assert sum_of_ranks(comm.shrink()) == 6
        assert sum_of_ranks(other) == 6

    ranks(3, run, transport=transport)


def test_revoke_wakes_a_waiting_receive(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> None:
        if comm.rank == 0:
            request = comm.irecv(np.zeros(3), 1)
            context.mark("posted")
            with pytest.raises(ftcomm.Revoked):
                request.wait()
        else:
            context.hold()
            comm.revoke()
        comm.agree()

    group = ranks.start(2, run, transport=transport)
    group.wait_for(0, "posted")
    group.release(1)
    Ranks.values(group)


def test_insulation(ranks: Ranks, transport: str) -> None:
    """No error on a communicator that has no dead member."""

    def run(comm: Comm, context: Context) -> Any:
        half = comm.split(comm.rank // 2)
        assert half is not None
        if comm.rank == 3:
            context.die()
        if comm.rank == 2:
            failure_of(half)
            return None
        for _ in range(300):
            assert sum_of_ranks(half, 20) == 3
        failure_of(comm)
        return sum_of_ranks(half)

    assert ranks(4, run, dies={3}, transport=transport)[:2] == [3, 3]


def test_timeout_names_who_is_missing(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> Any:
        if comm.rank == 2:
            context.hold()
            return None
        with pytest.raises(ftcomm.Timeout) as caught:
            comm.all_reduce(np.ones(5), timeout=1.0)
        context.mark("timed out")
        return caught.value.missing, caught.value.operation

    group = ranks.start(3, run, transport=transport)
    for rank in (0, 1):
        group.wait_for(rank, "timed out")
    group.release(2)
    values = Ranks.values(group)
    assert values[0] == values[1]
    assert values[0][0] == (2,)
    assert "all_reduce" in values[0][1]


def test_stopped_rank_is_voted_out_and_told(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> Any:
        comm.barrier()
        context.mark("ready")
        context.hold()
        if comm.rank == 1:
            with pytest.raises(ftcomm.StaleEpoch):
                while True:
                    comm.all_reduce(np.ones(10))
            return "stale"
        seen = failure_of(comm)
        result = sum_of_ranks(comm.shrink())
        context.mark("shrunk")
        return seen[1], result

    group = ranks.start(3, run, transport=transport)
    for rank in range(3):
        group.wait_for(rank, "ready")
    group.kill(1, signal.SIGSTOP)
    group.release(0)
    group.release(2)
    for rank in (0, 2):
        group.wait_for(rank, "shrunk")
    group.release(1)
    group.kill(1, signal.SIGCONT)
    results = group.results()
    assert [r.value for r in results] == [((1,), 3.0), "stale", ((1,), 3.0)]


def test_a_rank_that_returns_and_exits_at_once(ranks: Ranks, transport: str) -> None:
    """Its last operation succeeds for everybody: a goodbye is no failure."""

    def run(comm: Comm) -> float:
        return sum_of_ranks(comm, 10)

    for _ in range(10):
        assert ranks(4, run, transport=transport) == [10.0] * 4


def test_a_rank_that_left(ranks: Ranks, transport: str) -> None:
    """leave() is planned: who still needs the rank is told at once, with the evidence 'left'."""

    def run(comm: Comm) -> Any:
        comm.barrier()
        if comm.rank == 1:
            comm.leave()
            return None
        with pytest.raises(ftcomm.PeerFailure) as caught:
            while True:
                comm.all_reduce(np.ones(3))
        return caught.value.ranks, caught.value.evidence

    values = ranks(3, run, transport=transport, heartbeat=5.0)
    assert values[0] == values[2] == ((1,), ("left",))


def test_quiet_without_failure(ranks: Ranks, transport: str) -> None:
    """No suspicion under load: more ranks than cores, a short heartbeat, one busy in Python."""

    def run(comm: Comm) -> int:
        for _ in range(30):
            comm.all_reduce(np.ones(20_000))
            if comm.rank == 0:
                sum(range(300_000))
        epoch = comm.epoch
        comm.barrier()  # nobody leaves, which is an epoch too, before all have looked
        return epoch

    assert len(set(ranks(8, run, transport=transport, heartbeat=0.5))) == 1


def test_all_but_one(ranks: Ranks, transport: str) -> None:
    def run(comm: Comm, context: Context) -> float:
        if comm.rank != 2:
            context.die()
        failure_of(comm)
        smaller = comm.shrink()
        while smaller.size > 1:
            failure_of(smaller)
            smaller = smaller.shrink()
        return sum_of_ranks(smaller)

    assert ranks(4, run, dies={0, 1, 3}, transport=transport)[2] == 1


def test_replacement(ranks: Ranks, transport: str) -> None:
    """Direct API: a replacement waits, the survivors admit it at a point of their choice."""

    def run(comm: Comm, context: Context) -> Any:
        if context.incarnation:
            comm.job.join_wait().wait()
        else:
            if comm.rank == 1:
                context.die()
            while comm.all_reduce(np.ones(100)).contributors != (0, 2):
                pass
            comm.ack_failed()
            context.mark("without")
            context.hold()
            while comm.agree(int(comm.job.waiting() == (1,))) != 1:
                pass
            assert comm.job.admit().wait().contributors == (0, 1, 2)
        return comm.all_reduce(np.full(10, 1.0)).contributors, sum_of_ranks(comm)

    group: Group = ranks.start(3, run, policy="lossy", transport=transport)
    for rank in (0, 2):
        group.wait_for(rank, "without")
    group.spawn(1, run, incarnation=1)
    for rank in (0, 2):
        group.release(rank)
    results = group.results()
    good = [r for r in results if (r.rank, r.incarnation) != (1, 0)]
    assert all(r.ok for r in good), "\n".join(r.text() for r in results)
    assert [r.value for r in good] == [((0, 1, 2), 6.0)] * 3


def test_what_the_last_survivor_gets_of_the_dead(ranks: Ranks) -> None:
    """Zeros in their places, as with more survivors: also where an input lay in the output."""

    def run(comm: Comm, context: Context) -> list[list[float]]:
        if comm.rank != 1:
            context.die()
        while comm.all_reduce(np.ones(10)).contributors != (1,):
            pass
        got, out = np.full(6, 7.0), np.full(6, 7.0)
        comm.all_to_all(got, np.arange(6.0))
        comm.gather(out[2:4], out, root=1)
        return [got.tolist(), out.tolist()]

    assert ranks(3, run, dies={0, 2}, policy="lossy")[1] == [[0, 0, 2, 3, 0, 0], [0, 0, 7, 7, 0, 0]]


@pytest.mark.parametrize("frame", [1, 2, 3])
def test_a_goodbye_outlives_its_connection(ranks: Ranks, frame: int) -> None:
    """Rank 1 cuts it, at one of its last frames: whoever left is not taken for dead, as its port refuses then."""

    def run(comm: Comm) -> Any:
        comm.all_reduce(np.ones(10))
        if comm.rank == 0:
            return ("left",)
        with pytest.raises(ftcomm.PeerFailure) as failure:
            comm.recv(np.zeros(4), 0, 5)
        return failure.value.evidence

    assert ranks(2, run, transport="tcp", faults=f"rank=1,at=tcp.send:{frame},do=cut:0") == [("left",)] * 2
