"""What the kill tables share: the points and where they exist, a workload with its reference, the verdict, and what was hit.

A cell kills one role at one failpoint. A cell whose role never takes the victim there is skipped (only a leader decides);
the summary at the end of a run says which points no cell has hit, and a whole run in which one is missing fails.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from harness import Result

import ftcomm
from ftcomm._lib import lib

Comm = ftcomm.Communicator
TRANSPORTS = ("shm", "tcp", "hosts")  # hosts: two ranks on each, tcp between them
HEARTBEAT = 2.0  # no death here is noticed by silence, and eight ranks on two busy processors are not to be suspected
# Points of one transport; over "hosts" go those that exist nowhere else.
ONLY = {
    "shm.": "shm",
    "pull.": "shm",
    "stage.": "shm",
    "share.": "shm",
    "flat.post": "shm",
    "p2p.read": "shm",
    "p2p.received": "shm",
    "direct.show": "shm",  # parts that are read where they lie
    "direct.read": "shm",
    "p2p.data": "tcp",  # on one host they are, too
    "tcp.": "tcp",
    "handshake.": "tcp",
    "group.": "hosts",
    "channel.piece": "tcp",
    "channel.shown": "shm",
    "channel.send.marked": "shm",
    "channel.arrived": "tcp",
}
START = ("rendezvous.", "start.", "handshake.", "comm.create")
JOIN = ("join.request", "join.admit", "join.before", "join.after")
TRAINING = ("step", "join.transfer.")  # passed by torch's join point only
LEAVE = ("leave.",)
VIEW = ("vote.", "decide.", "view.", "spread.")  # after a death, under both policies
AFTER_A_DEATH = (*VIEW, "agree.", "shrink.")
REPAIR = ("repair.",)  # under lossy
LOGGED = ("share.", "result.", "channel.", "log.payload.", "log.header.", "log.watermark.", "log.roll.")  # under replay
# In tests/replay, test_checkpoints.py, test_late_logging.py, test_lost_logs.py, test_selective.py, test_notes.py and
# test_hosts_die.py kill there.
LATER = (
    "checkpoint.",
    "log.collect.",
    "log.ack",
    "late.",
    "restore.",
    "unlogged.",
    "note.",
    "join.make",
    "join.mapped",
)
WINDOWS = ("stage.", "shm.window")  # of ranks that share processors: tests/processors.py
OPERATION = ("collective.", "ring.", "pull.", "stage.", "group.", "fence.", "flat.", "direct.", "p2p.", "tcp.", "shm.")


def points(*prefixes: str) -> list[str]:
    ffi, C = lib()
    names = [point["name"] for point in json.loads(ffi.string(C.ft_fault_points()).decode())]
    return [name for name in names if not prefixes or name.startswith(prefixes)]


def cells(*prefixes: str) -> list[tuple[str, str]]:
    """(point, transport) wherever such a point exists."""
    return [
        (point, transport)
        for point in points(*prefixes)
        for transport in TRANSPORTS
        if not point.startswith(LATER)
        and (transport == "hosts") == point.startswith("group.")
        and all(transport == only for prefix, only in ONLY.items() if point.startswith(prefix))
    ]


def digest(*arrays: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


# -- inputs and their reference

HALF, SMALL = 30_000, 16
_generator = np.random.default_rng(7)
_WHOLE = _generator.integers(-(2**40), 2**40, HALF).astype(np.float64)  # sums are exact: the same in any order
_REAL = _generator.standard_normal(HALF)


def large(round: int, slot: int) -> np.ndarray[Any, Any]:
    """Whole numbers, whose sum can be compared bit by bit, then others, whose sum shows the order of the additions."""
    by = 1009 * round + 131 * slot
    return np.concatenate([np.roll(_WHOLE, by), np.roll(_REAL, by)])


def small(round: int, slot: int) -> np.ndarray[Any, Any]:
    by = 17 * round + 5 * slot
    return np.concatenate([np.roll(_WHOLE, by)[: SMALL // 2], np.roll(_REAL, by)[: SMALL // 2]])


def check_large(got: np.ndarray[Any, Any], round: int, slots: Sequence[int], divisor: int = 1, first: int = 0) -> None:
    """``got`` is the elements from ``first`` on of the sum over the slots, divided."""
    want = sum(large(round, slot) for slot in slots)[first : first + got.size] / divisor
    whole = max(0, min(HALF - first, got.size))
    np.testing.assert_array_equal(got[:whole], want[:whole])
    np.testing.assert_allclose(got[whole:], want[whole:], rtol=0, atol=1e-13 * len(slots))


def check_small(got: np.ndarray[Any, Any], round: int, slots: Sequence[int], repaired: bool = False) -> None:
    """The flat algorithm adds in the order of the ranks: the same bits as here. A repair runs as a ring, and more than four of
    a host, and the tests' chains, add along a tree: each in an order of its own, the same on all ranks."""
    want = small(round, slots[0])
    for slot in slots[1:]:
        want = want + small(round, slot)
    along_a_tree = len(slots) > 4 or "FTCOMM_SPREAD_DEGREE" in os.environ
    exact = SMALL // 2 if repaired or along_a_tree else SMALL
    np.testing.assert_array_equal(got[:exact], (want / len(slots))[:exact])
    np.testing.assert_allclose(got, want / len(slots), rtol=0, atol=1e-13 * len(slots))


def work(comm: Comm, round: int) -> str:
    """One of everything, compared with the reference for this team; the digest covers what must be the same on all ranks."""
    me, slots = comm.slots[comm.rank], comm.slots
    big, little = large(round, me), small(round, me)
    comm.all_reduce(big, algorithm="ring")
    check_large(big, round, slots)
    pulled = large(round, me)
    comm.all_reduce(pulled)
    check_large(pulled, round, slots)
    comm.all_reduce(little, "avg", algorithm="flat")
    check_small(little, round, slots)
    root = round % comm.size
    told = np.full(20_000, comm.rank, np.int32)
    comm.broadcast(told, root)
    assert (told == root).all()
    word = np.full(16, comm.rank, np.int32)
    comm.broadcast(word, comm.size - 1 - root)
    assert (word == comm.size - 1 - root).all()
    gathered = np.zeros(comm.size)
    comm.all_gather(gathered, np.array([float(me)]))
    assert tuple(gathered) == slots
    scattered = large(round, me)[: comm.size * 1000]
    mine = np.zeros(1000)
    comm.reduce_scatter(mine, scattered)
    check_large(mine, round, slots, first=1000 * comm.rank)
    few = np.zeros(10)
    comm.reduce_scatter(few, scattered[: comm.size * 10])
    check_large(few, round, slots, first=10 * comm.rank)
    for count in (200, 3000):
        total = large(round, me)[:count]
        comm.reduce(total, root)
        if comm.rank == root:
            check_large(total, round, slots)
    if comm.size > 1:
        # to all, brought, sent when it is asked for, and shown where memory is shared
        for part in (30, 600, 3000, 17_000):
            swapped = np.zeros(comm.size * part)
            comm.all_to_all(swapped, np.full(comm.size * part, comm.rank + 0.5))
            np.testing.assert_array_equal(swapped, np.repeat(np.arange(comm.size) + 0.5, part))
        for count in (4, 50_000):  # eager, and announced
            after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            got = np.zeros(count)
            sending = comm.isend(np.full(count, float(comm.rank)), after)
            comm.recv(got, before)
            sending.wait()
            assert (got == before).all()
    other = comm.dup()
    other.barrier()
    other.close()
    return digest(big, pulled, little, told, word, gathered)


def survive(comm: Comm, rounds: int) -> tuple[list[tuple[int, str]], tuple[int, ...]]:
    """Works, shrinks whenever somebody is gone, works again: (round, digest) of what all have, and who is left."""
    done: list[tuple[int, str]] = []
    round = 0
    while round < rounds:
        try:
            value, ok = work(comm, round), 1
        except (ftcomm.PeerFailure, ftcomm.Revoked):
            if not comm.revoked:
                comm.revoke()
            value, ok = "", 0
        comm.ack_failed()
        try:
            all_ok = comm.agree(ok)
        except ftcomm.PeerFailure as error:
            assert error.value is not None
            all_ok = error.value
        if all_ok & 1:
            done.append((round, value))
            round += 1
        else:
            comm = comm.shrink()
    return done, comm.slots


def lossy_rounds(comm: Comm, first: int, last: int) -> list[str]:
    """All-reduces under lossy: each part is the average over those who contributed to it, and everybody has the same."""
    seen = []
    for round in range(first, last):
        big, little = large(round, comm.rank), small(round, comm.rank)
        outcome = comm.all_reduce(big, "avg", algorithm="ring")
        for offset, count, who in outcome.chunks:
            check_large(big[offset : offset + count], round, who, len(who), offset)
        pulled = large(round, comm.rank)
        second = comm.all_reduce(pulled, "avg")
        for offset, count, who in second.chunks:
            check_large(pulled[offset : offset + count], round, who, len(who), offset)
        flat = comm.all_reduce(little, "avg", algorithm="flat")
        check_small(little, round, flat.contributors, repaired=True)
        seen.append(f"{round} {outcome.chunks} {second.chunks} {flat.contributors} {digest(big, pulled, little)}")
        seen.append(gathered_under_lossy(comm))
    return seen


def gathered_under_lossy(comm: Comm) -> str:
    """A small all-gather: zeros from who had died before, and an error everywhere if somebody died in it with its block."""
    gathered = np.zeros(2 * comm.size)
    try:
        outcome = comm.all_gather(gathered, np.full(2, comm.rank + 0.5))
    except ftcomm.PeerFailure:
        return "gone"
    for offset, count, who in outcome.chunks:
        assert (gathered[offset : offset + count] == (offset // 2 + 0.5 if who else 0)).all()
    return f"{outcome.chunks} {digest(gathered)}"


# -- the verdict

_hits: dict[tuple[str, str], list[bool]] = defaultdict(list)
_recorded: list[tuple[str, str, bool]] = []


def record(point: str, transport: str, hit: bool) -> None:
    """For the summary; the cell of a victim that was not killed is skipped."""
    _recorded.append((point.partition(":")[0], transport, hit))
    if not hit:
        pytest.skip(f"nobody of this role passes {point}")


def text_of(results: Sequence[Result]) -> str:
    return "\n".join(result.text() for result in results)


def judge(results: Sequence[Result], may_die: set[int], victims: set[int], point: str, transport: str) -> None:
    """Only those who may have died; the survivors have ended well and with the same value."""
    dead = {r.rank for r in results if r.status == -9}
    alive = [r for r in results if r.rank not in dead]
    assert dead <= may_die, text_of(results)
    assert all(r.ok for r in alive), text_of(results)
    assert len({str(r.value) for r in alive}) <= 1, f"survivors differ\n{text_of(results)}"
    record(point, transport, bool(victims & dead))


# -- the summary


def take_recorded() -> list[tuple[str, str, bool]]:
    """Of the test that has just ended. Its report takes them along: tests run in other processes than the summary."""
    taken = _recorded[:]
    _recorded.clear()
    return taken


def count(point: str, transport: str, hit: bool) -> None:
    _hits[point, transport].append(hit)


def summary(whole: bool) -> list[str]:
    """Of the whole tables each point has a line, also one that no cell is of."""
    lines = []
    for point, transport in cells():
        hits = _hits.get((point, transport), [])
        if not hits and not whole:
            continue
        lines.append(
            f"{point:24} {transport}  killed in {sum(hits):3} of {len(hits):3} cells" + ("" if any(hits) else "  NEVER")
        )
    return lines


def never_hit() -> list[str]:
    return [f"{point} over {transport}" for point, transport in cells() if not any(_hits.get((point, transport), []))]


def any_cells() -> bool:
    return bool(_hits)
