"""Views, decisions and results of agree go along trees where ranks are many, here along chains. Those on the way die."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Context, Ranks

import ftcomm

Comm = ftcomm.Communicator
SIZE = 5
pytestmark = pytest.mark.usefixtures("chains")


def agreed(comm: Comm, flag: int) -> int:
    """What all agree on, once all know of the deaths."""
    while True:
        try:
            return comm.agree(flag)
        except ftcomm.PeerFailure:
            comm.ack_failed()


def survivors_agree(comm: Comm) -> list[Any]:
    out: list[Any] = []
    for number in range(6):
        out.append(agreed(comm, ~(1 << (number + comm.rank))))
    smaller = comm.shrink()
    buf = np.full(10, comm.rank + 1.0)
    smaller.all_reduce(buf)
    return [*out, smaller.slots, float(buf[0]), agreed(smaller, comm.rank + 8)]


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        *((0, point) for point in ("agree.before:3", "agree.after:3", "shrink.after")),  # it leads
        *((2, point) for point in ("agree.vote:3", "spread.pass_on:3")),
        (4, "agree.vote:3"),  # the last one
    ],
)
@pytest.mark.sample(4)
def test_those_on_the_way_of_an_agree_die(ranks: Ranks, transport: str, victim: int, point: str) -> None:
    faults = f"rank={victim},at={point},do=kill"
    values = ranks(SIZE, survivors_agree, transport=transport, policy="lossy", faults=faults, dies={victim})
    survivors = [r for r in range(SIZE) if r != victim]
    assert all(values[r] == values[survivors[0]] for r in survivors)
    *_, slots, total, last_flag = values[survivors[0]]
    assert slots == (tuple(range(SIZE)) if point == "shrink.after" else tuple(survivors))  # decided before it died
    assert total == sum(r + 1 for r in survivors)
    assert last_flag == 8


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("second", [2, 3])
def test_those_on_the_way_of_a_decision_die(ranks: Ranks, transport: str, second: int, nth: int) -> None:
    """Rank 1's death is decided; another one dies with the call to vote, or with the decision."""

    def run(comm: Comm, context: Context) -> Any:
        seen, mine = [], comm.rank + 1.0
        for step in range(40):
            if (step, comm.rank) == (5, 1):
                context.die()
            buf = np.full(1000, mine)
            comm.all_reduce(buf)
            assert (buf == buf[0]).all()
            seen.append(float(buf[0]))
            if step == 20:
                comm.revoke()  # decided by the same votes
                comm = comm.shrink()
        for flag in (1, 3):  # where no call to vote was needed, a result of these is the nth that is passed on
            agreed(comm, flag)
        comm = comm.shrink()
        buf = np.full(1, mine)
        comm.all_reduce(buf)
        return [*seen, float(buf[0])], comm.slots

    faults = f"rank={second},at=spread.pass_on:{nth},do=kill"
    group = ranks.start(SIZE, run, transport=transport, policy="lossy", faults=faults)
    results = group.results()
    survivors = [results[r] for r in range(SIZE) if r not in (1, second)]
    assert all(r.ok for r in survivors), "\n".join(r.text() for r in results)
    assert second not in survivors[0].value[1], results[second].log
    assert all(r.value == survivors[0].value for r in survivors)
    assert survivors[0].value[0][-1] == sum(r + 1 for r in range(SIZE) if r not in (1, second))


def test_one_that_is_stopped_on_the_way_is_gone_round(ranks: Ranks) -> None:
    """It is voted out, and the others get through other ranks what it has kept; when it goes on, it is told."""
    faults = "rank=2,at=spread.pass_on:2,do=stop:4"
    results = ranks.start(SIZE, survivors_agree, policy="lossy", heartbeat=0.5, faults=faults).results()
    others = [r for r in results if r.rank != 2]
    assert all(r.ok for r in others), "\n".join(r.text() for r in results)
    assert all(r.value == others[0].value for r in others)
    assert others[0].value[6] == (0, 1, 3, 4)
    assert not results[2].ok
    assert "StaleEpoch" in results[2].text()


@pytest.mark.parametrize("victim", [0, 2, SIZE - 1])
@pytest.mark.parametrize("point", ["flat.send:9", "flat.receive:8", "flat.reduce:6", "flat.done:7"])
@pytest.mark.sample(8)
def test_those_on_the_way_of_a_small_operation_die(ranks: Ranks, transport: str, victim: int, point: str) -> None:
    """Sums, gathers and barriers, which have no fence: whoever has returned from one keeps its result for the others."""

    def run(comm: Comm) -> Any:
        seen = []
        for step in range(30):
            buf = np.full(3, 2.0**comm.rank)
            who = comm.all_reduce(buf).contributors
            assert (buf == sum(2.0**r for r in who)).all()
            out = np.zeros(comm.size)
            try:
                comm.all_gather(out, np.full(1, step + 2.0**comm.rank))
            except ftcomm.PeerFailure:  # the block of one who died in it
                out[:] = -1
            comm.barrier()
            seen.append((who, out.tolist()))
        return seen

    name, _, number = point.partition(":")
    if (name == "flat.send" and victim == SIZE - 1) or (name == "flat.receive" and victim == 0):
        number = str(int(number) // 2)  # one message for each operation, not two
    faults = f"rank={victim},at={name}:{number},do=kill"
    values = ranks(SIZE, run, transport=transport, policy="lossy", faults=faults, dies={victim})
    survivors = [r for r in range(SIZE) if r != victim]
    assert all(values[r] == values[survivors[0]] for r in survivors)
    assert values[survivors[0]][-1][0] == tuple(survivors)


def test_small_sums_of_float16_along_a_tree_are_rounded_once(ranks: Ranks) -> None:
    """The one furthest from the root has 2048, to which the others add 1 each on its way: a tie in float16, each time."""

    def run(comm: Comm) -> list[float]:
        total, mean, scaled = (np.full(64, x, np.float16) for x in (2048 if comm.rank == SIZE - 1 else 1, 60000, 1))
        comm.all_reduce(total, algorithm="flat")
        comm.all_reduce(mean, "avg", algorithm="flat")
        comm.all_reduce(scaled, "premul_sum", algorithm="flat", factor=0.1)
        return [float(total.min()), float(mean.max()), float(scaled[0])]

    assert ranks(SIZE, run) == [[2052.0, float(np.float16(60000)), 0.5]] * SIZE
