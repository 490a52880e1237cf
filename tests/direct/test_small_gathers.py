"""Small operations that sum nothing have no fence: whoever dies in one, and wherever, all others say the same of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks

import ftcomm

Comm = ftcomm.Communicator
HEARTBEAT, ROUNDS = 2.0, 4


def one(comm: Comm, round: int, which: int) -> Any:
    """Operation ``which`` of a round: what it gave, compared with what it must give, or that a rank is gone."""
    rank, size = comm.rank, comm.size
    root = round % size
    try:
        if which == 0:
            word = np.full(5, 10 * round + rank, np.int32)
            comm.broadcast(word, root)
            assert (word == 10 * round + root).all(), word
            return word.tolist()
        if which == 1:
            gathered = np.full(3 * size, -1.0)
            outcome = comm.all_gather(gathered, np.full(3, 100.0 * round + rank))
            for offset, count, who in outcome.chunks:
                assert (gathered[offset : offset + count] == (100 * round + offset // 3 if who else 0)).all(), gathered
            return [outcome.chunks, gathered.tolist()]
        if which == 2:
            return [comm.barrier().contributors]
        swapped = np.full(2 * size, -1.0)
        outcome = comm.all_to_all(swapped, np.repeat(1000 * round + 10 * rank + np.arange(float(size)), 2))
        expected = [1000 * round + 10 * r + rank if r in outcome.contributors else 0 for r in range(size)]
        assert (swapped == np.repeat(expected, 2)).all(), swapped
        return [outcome.contributors]
    except ftcomm.PeerFailure as error:
        return ["gone", sorted(error.ranks)]


def rounds(comm: Comm, context: Context) -> list[Any]:
    return [one(comm, round, which) for round in range(ROUNDS) for which in range(4)]


SENT = ["flat.send:7", "flat.send:9", "flat.send:10", "flat.receive:8", "flat.done:4", "flat.done:5"]
SHOWN = [
    "flat.post:3",
    "flat.post:4",
    "flat.post:6",
    "flat.receive:8",
    "flat.receive:9",
    "flat.receive:12",
    "flat.done:7",
]


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(("point", "limit"), [*((point, 0) for point in SENT), *((point, 4096) for point in SHOWN)])
@pytest.mark.parametrize("policy", ["raise", "lossy"])
@pytest.mark.sample(26)
def test_kill(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, policy: str, point: str, limit: int, victim: int) -> None:
    """Three ranks: two sends, or one post, two receives and one end for each operation; the first operation is ftcomm.init's
    or ours, and always sent."""
    monkeypatch.setenv("FTCOMM_POST_LIMIT", str(limit))
    fault = f"rank={victim},at={point},do=kill"
    results = ranks.start(3, rounds, faults=fault, heartbeat=HEARTBEAT, policy=policy).results(120)
    assert results[victim].status == -9
    seen = [result.value for result in results if result.rank != victim]
    assert seen[0] == seen[1]
    gone = [value for value in seen[0] if value[:1] == ["gone"]]
    if policy == "raise":
        assert gone
        assert gone == seen[0][-len(gone) :], "after the first that failed all fail"
    assert all(value == ["gone", [victim]] for value in gone)


@pytest.mark.parametrize("size", [2, 3, 8, 9])
@pytest.mark.parametrize("count", [0, 1, 1000, 40_000])
@pytest.mark.sample(8)
def test_result(ranks: Ranks, size: int, count: int) -> None:
    """Without data, small, beyond what the small-message algorithm takes, with more ranks than it takes."""

    def run(comm: Comm, context: Context) -> None:
        everyone = tuple(range(size))
        for root in (0, size - 1):
            word = np.full(count, float(comm.rank))
            outcome = comm.broadcast(word, root)
            assert (word == root).all()
            assert outcome.contributors == ((root,) if count else everyone)
            assert [chunk[2] for chunk in outcome.chunks] == ([(root,)] if count else [])
        gathered = np.full(size * count, -1.0)
        outcome = comm.all_gather(gathered, np.full(count, float(comm.rank)))
        assert (gathered == np.repeat(np.arange(size), count)).all()
        assert outcome.contributors == everyone
        assert outcome.chunks == (tuple((r * count, count, (r,)) for r in everyone) if count else ())
        assert comm.barrier().contributors == everyone
        swapped = np.full(size * count, -1.0)
        outcome = comm.all_to_all(swapped, np.repeat(10.0 * comm.rank + np.arange(size), count))
        assert (swapped == np.repeat(10.0 * np.arange(size) + comm.rank, count)).all()
        assert outcome.contributors == everyone

    for result in ranks.start(size, run, heartbeat=HEARTBEAT).results(120):
        assert result.ok, result
