"""Small inputs of one host are shown and not sent: many of them, beside what is sent, in several communicators at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks

import ftcomm

Comm = ftcomm.Communicator
LARGE = 200_000  # elements


@pytest.mark.parametrize("limit", ["0", "24", "4096", "16384"])
@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.sample(4)
def test_in_turn_with_what_is_sent(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, size: int, limit: str) -> None:
    monkeypatch.setenv("FTCOMM_POST_LIMIT", limit)
    everyone = np.arange(size)

    def run(comm: Comm, context: Context) -> None:
        rank = comm.rank
        for i in range(300):
            added = np.full(1 + i % 9, float(rank + i))
            comm.all_reduce(added)
            assert (added == everyone.sum() + size * i).all()
            if i % 3 == 0:
                gathered = np.zeros(size * 2000)
                comm.all_gather(gathered, np.full(2000, float(rank + i)))
                assert (gathered.reshape(size, -1) == (everyone + i)[:, None]).all()
            if i % 4 == 0:
                word = np.full(3, float(rank + i))
                comm.broadcast(word, i % size)
                assert (word == i + i % size).all()
            if i % 5 == 0:
                comm.barrier()
            if i % 7 == 0:
                parts = np.zeros(2 * size)
                comm.all_to_all(parts, np.repeat(10.0 * everyone + rank, 2))
                assert (parts == np.repeat(10.0 * rank + everyone, 2)).all()
            if i % 23 == 0:
                large = np.full(LARGE, float(rank))
                comm.all_reduce(large)
                assert (large == everyone.sum()).all()
            assert comm.stats()["post_limit"] == int(limit)

    ranks(size, run)


def test_in_more_communicators_than_are_looked_at(ranks: Ranks) -> None:
    """Each waits in twelve at once for two others, and in another order than they do; then it sleeps for some of them."""
    many = 12

    def run(comm: Comm, context: Context) -> None:
        comms = [comm.dup() for _ in range(many)]
        random = np.random.default_rng(comm.rank)
        for round in range(40):
            words = [np.full(2, float(comm.rank + k)) for k in range(many)]
            requests: list[Any] = [None] * many
            for k in random.permutation(many):
                requests[k] = comms[k].iall_reduce(words[k])
                if random.random() < 0.01:
                    time.sleep(0.01)  # the others sleep meanwhile, and are woken
            for k in random.permutation(many):
                requests[k].wait()
                assert (words[k] == sum(range(comm.size)) + comm.size * k).all(), round

    ranks(3, run)


def test_closed_while_another_rank_is_late(ranks: Ranks) -> None:
    """The memory goes to the next communicator, in which those who are through show something else."""

    def run(comm: Comm, context: Context) -> None:
        for i in range(30):
            one = comm.dup()
            for _ in range(3):
                word = np.full(2, float(comm.rank + i))
                one.all_reduce(word)
                assert (word == sum(range(comm.size)) + comm.size * i).all()
            if comm.rank == i % comm.size:
                word = np.full(2, float(comm.rank + i))
                request = one.iall_reduce(word)
                time.sleep(0.12 if i % 10 == 0 else 0.0)  # two ticks and more
                request.wait()
            else:
                word = np.full(2, float(comm.rank + i))
                one.all_reduce(word)
            assert (word == sum(range(comm.size)) + comm.size * i).all()
            one.close()

    ranks(3, run, heartbeat=1.0)


def test_ranks_that_die_in_turn(ranks: Ranks) -> None:
    """Each where it has shown what it puts in, and has woken nobody: all left have the same sums, with or without it."""
    size = 4

    def run(comm: Comm, context: Context) -> list[float]:
        seen = []
        for _ in range(60):
            word = np.full(1, 2.0**comm.rank)
            outcome = comm.all_reduce(word)
            assert word[0] == sum(2.0**r for r in outcome.contributors)
            seen.append(float(word[0]))
        return seen

    faults = "rank=3,at=flat.post:9,do=kill;rank=1,at=flat.receive:41,do=kill"
    results = ranks.start(size, run, policy="lossy", heartbeat=2.0, faults=faults).results(120)
    assert [r.status for r in results if r.rank in (1, 3)] == [-9, -9]
    assert results[0].value == results[2].value
    assert results[0].value[-1] == 5.0
