"""Policy replay: whatever is killed whenever, the output is bit for bit that of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import programs
import pytest
from harness import Context, Ranks
from keeper import Keeper
from tables import most

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")


@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"])
def test_kills_at_random_moments(keep: Keep, undisturbed: Any, transport: str) -> None:
    wanted = undisturbed(4, programs.ring, transport)
    job = keep(4, programs.ring, transport=transport)
    rng = random.Random(transport)
    for _ in range(6):
        victim, before = rng.randrange(4), job.incarnation
        job.run_until(lambda victim=victim: job.marked(victim, "running"))
        if job.kill(victim):
            now = before(victim)
            job.run_until(lambda victim=victim, now=now: job.incarnation(victim) != now)
            job.group._marks[:] = [mark for mark in job.group._marks if mark[0] != victim]
    assert job.values() == wanted
    assert job.restarts > 0


@pytest.mark.table
@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"])
def test_a_hundred_kills(keep: Keep, transport: str) -> None:
    def long_ring(comm: Any, context: Context) -> list[str]:
        return programs.ring(comm, context, steps=20_000, count=500)

    wanted = keep(4, long_ring, transport=transport).values(120)
    job = keep(4, long_ring, transport=transport)
    killed = job.kill_at_random(100, transport)
    assert job.values(120) == wanted
    assert killed == 100


@pytest.mark.parametrize(("transport", "limit"), [("shm", 48 << 20), ("hosts", 80 << 20)])
def test_results_are_logged_once_per_host(keep: Keep, transport: str, limit: int) -> None:
    """100 MiB, more than a rank may keep: it keeps a quarter, or half. Who is killed at the end gets the rest from the others."""

    def run(comm: Any, context: Context) -> str:
        x = np.random.default_rng(comm.rank).standard_normal(64 << 10).astype(np.float32)
        for step in range(400):
            if step % 3 == 2:
                comm.broadcast(x, step % comm.size)
            else:
                comm.all_reduce(x, "avg", algorithm="ring")
            x += np.float32(comm.rank)
        comm.barrier()
        return programs.digest(x)

    wanted = keep(4, run, transport=transport, log_limit=limit).values()
    victims = {2} if transport == "shm" else {2, 3}
    faults = ";".join(f"rank={victim}.0,at=fence.before:400,do=kill" for victim in victims)
    job = keep(4, run, transport=transport, log_limit=limit, faults=faults)
    assert job.values() == wanted
    assert set(job.deaths) == {(victim, 0) for victim in victims}


@pytest.mark.parametrize(
    ("transport", "victims"),
    most([("shm", {0, 1}), ("tcp", {1, 2}), ("shm", {0, 1, 2})], product(["shm", "tcp"], [{0, 1}, {1, 2}, {0, 1, 2}])),
)
def test_several_at_once(keep: Keep, undisturbed: Any, transport: str, victims: set[int]) -> None:
    """Both sides of a pair; and all: then there is nobody left to come back to, and a new generation starts from the logs."""
    wanted = undisturbed(3, programs.everything, transport)
    job = keep(3, programs.everything, transport=transport)
    job.run_until(lambda: all(job.marked(rank, "running") for rank in range(3)))
    for victim in victims:
        job.kill(victim)
    assert job.values() == wanted
    assert {rank for rank, _ in job.deaths} >= victims or job.generation > 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_process_that_fails_is_no_process_that_leaves(keep: Keep, undisturbed: Any, transport: str) -> None:
    """It closes its job on the way out, as at an exception. The others must not go on with a sum that lacks it."""

    def failing(comm: Any, context: Context) -> Any:
        if comm.rank == 1 and context.incarnation == 0:
            programs.everything(comm, context, steps=3)
            comm.job.close()
            raise RuntimeError("once")
        return programs.everything(comm, context)

    wanted = undisturbed(3, programs.everything, transport)
    job = keep(3, failing, transport=transport)
    assert job.values() == wanted
    assert job.deaths[0] == (1, 0)


def test_log_of_an_earlier_run_is_not_read(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without a launcher two runs of the same name have the same folder; the first was killed."""

    def run(number: int) -> Callable[[Any, Context], Any]:
        def program(comm: Any, context: Context) -> Any:
            x = np.full(4, number + comm.rank, np.float32)
            comm.all_reduce(x)
            comm.ft_send(x, 1 - comm.rank)
            comm.ft_recv(x, 1 - comm.rank)
            if number == 1:
                context.mark("done")
                context.hold()
            return x.tolist()

        return program

    folder = str(tmp_path / "log")
    first = ranks.start(2, run(1), policy="replay", log_dir=folder)
    for rank in range(2):
        first.wait_for(rank, "done")
    first.abort()
    assert ranks(2, run(10), policy="replay", log_dir=folder) == [[21.0] * 4] * 2
    assert list((tmp_path / "log").iterdir()) == []


def test_a_newcomer_that_is_met_in_the_cell_first(keep: Keep, undisturbed: Any) -> None:
    """Rank 3's replacement is stopped when only rank 0 has heard its request; rank 0 admits it and dies, telling nobody.

    The others hear of it where they want to record rank 0's death. (Sometimes rank 0 loses the first race, and lives.)
    """
    wanted = undisturbed(4, programs.everything, "shm")
    first = "rank=3.0,at=result.before:9,do=kill;rank=3.1,at=shm.commit:2,do=stop:0.5"
    spec = f"{first};rank=0.0,at=view.after:2,do=kill"
    job = keep(4, programs.everything, transport="shm", faults=spec, heartbeat=2.0)
    assert job.values() == wanted
    assert (3, 0) in job.deaths
