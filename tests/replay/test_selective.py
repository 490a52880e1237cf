"""Policy replay with log groups: what is said inside one is not logged, it starts again as a whole, the output is the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import test_checkpoints as checkpointed
from harness import Context, Ranks
from keeper import Keeper

import ftcomm

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")
PAIRS = [[0, 1], [2, 3]]
POINTS = ["unlogged.receive", "p2p.eager", "p2p.rts", "p2p.cts", "p2p.data", "p2p.data.send"]


def groups_of(victims: set[int]) -> set[int]:
    return {rank for group in PAIRS for rank in group if set(group) & victims}


def check(job: Keeper, wanted: list[Any], victims: set[int]) -> None:
    """The same output, and only those who had to start again did."""
    assert job.values(120) == wanted
    # The second of a group may be taken along before its own signal comes.
    assert {rank for rank, _ in job.deaths + job.taken_along} >= victims or job.generation > 0
    if job.generation == 0:
        assert {rank for rank, _ in job.deaths + job.taken_along} == groups_of(victims)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("victims", [{0}, {3}, {2, 3}, {1, 2}])
@pytest.mark.sample(3)
def test_group_starts_again_and_the_others_stay(
    keep: Keep, undisturbed: Any, transport: str, victims: set[int]
) -> None:
    """One of a group; all of one; one of each: then nobody is left, and all start again as the next generation."""
    wanted = undisturbed(4, programs.everything, transport)
    job = keep(4, programs.everything, transport=transport, log=PAIRS)
    job.run_until(lambda: all(job.marked(rank, "running") for rank in range(4)))
    for victim in victims:
        job.kill(victim)
    check(job, wanted, victims)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.sample(2)
def test_kill_inside_a_message(keep: Keep, undisturbed: Any, point: str) -> None:
    """Rank 0 sends to rank 1 and 2 to 3; who passes the point dies there."""
    wanted = undisturbed(4, programs.everything, "shm")
    sends = point in ("p2p.eager", "p2p.rts", "p2p.data.send")
    victim = 2 if sends else 3
    job = keep(4, programs.everything, transport="shm", log=PAIRS, faults=f"rank={victim}.0,at={point}:3,do=kill")
    check(job, wanted, {victim})


@pytest.mark.parametrize("second", ["rank=0.1,at=join.request,do=kill", "rank=1.1,at=unlogged.receive:2,do=kill"])
def test_death_while_the_group_is_coming_back(keep: Keep, undisturbed: Any, second: str) -> None:
    """Of one that is not in yet, and of one that has spoken to the others."""
    wanted = undisturbed(4, programs.everything, "shm")
    job = keep(
        4, programs.everything, transport="shm", log=PAIRS, faults=f"rank=0.0,at=result.before:20,do=kill;{second}"
    )
    check(job, wanted, {0})
    assert len(job.deaths) >= 2


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_death_that_is_seen_when_the_others_of_the_group_are_back(keep: Keep, undisturbed: Any, victim: int) -> None:
    """Sockets close before a process can be reaped: the others may have heard, ended and come back by then, and are to stay."""
    wanted = undisturbed(4, programs.everything, "shm")
    fault = f"rank={victim}.0,at=result.before:20,do=kill"
    groups = [[0, 1, 2], [3]]
    job = keep(4, programs.everything, transport="shm", log=groups, faults=fault, seen_late=victim)
    assert job.values(120) == wanted
    assert job.deaths == [(victim, 0)]
    assert sorted(job.taken_along) == [(rank, 0) for rank in groups[0] if rank != victim]


@pytest.mark.parametrize("point", ["unlogged.receive:9", "group.sum:2", "channel.piece:4"])
def test_only_messages_between_hosts(keep: Keep, undisturbed: Any, point: str) -> None:
    """Two hosts with two ranks each: a host starts again as a whole, and its ranks share memory as before."""
    wanted = undisturbed(4, programs.everything, "hosts")
    job = keep(
        4,
        programs.everything,
        transport="hosts",
        log="inter-host",
        faults=f"rank=1.0,at={point},do=kill",
        heartbeat=2.0,
    )
    assert job.values(120) == wanted
    assert {rank for rank, _ in job.deaths + job.taken_along} == {0, 1}


def test_messages_inside_take_no_log(ranks: Ranks) -> None:
    def run(comm: Any, context: Context) -> int:
        x = np.ones(1 << 20, np.uint8)
        peer = comm.rank ^ 1
        for _ in range(30):
            request = comm.irecv(np.empty_like(x), peer)
            comm.send(x, peer)
            request.wait()
        return int(comm.job.info()["log"]["resident"])

    assert max(ranks(4, run, policy="replay", log=PAIRS)) < 8 << 20
    assert min(ranks(4, run, policy="replay", log=[[0, 2], [1, 3]])) >= 30 << 20


def test_anybody_may_be_of_the_group_or_not(keep: Keep) -> None:
    """Who answers a receive from ANY is on record, also of a message that is not: what followed from it has left the group."""

    def run(comm: Any, context: Context) -> list[int]:
        order = []
        for step in range(30):
            if step == 2:
                context.mark("running")
            if comm.rank == 0:
                box = np.zeros(1, np.int64)
                for _ in range(3):
                    order.append(comm.ft_recv(box, ftcomm.ANY, tag=step))
                comm.ft_send(np.array(order[-3:]), 2, tag=100 + step)
            else:
                comm.ft_send(np.array([step]), 0, tag=step)
            if comm.rank == 2:
                heard = np.zeros(3, np.int64)
                comm.ft_recv(heard, 0, tag=100 + step)
                order += heard.tolist()
            comm.barrier()
        return order

    job = keep(4, run, log=PAIRS)
    job.run_until(lambda: all(job.marked(rank, "running") for rank in range(4)))
    job.kill(1)
    values = job.values()
    assert values[0] == values[2]


@pytest.mark.parametrize(
    "point", ["checkpoint.mark.before", "checkpoint.mark.after", "unlogged.resume", "checkpoint.collect"]
)
@pytest.mark.sample(2)
def test_group_goes_on_from_one_checkpoint(keep: Keep, tmp_path: Path, point: str) -> None:
    """Rank 1 dies around a commit that rank 0 may have seen the end of, or where its group tells each other what it has."""
    wanted = [digest for digest, _ in keep(4, saving(tmp_path / "wanted"), transport="shm").values()]
    first = f"{point}:3" if point.startswith("checkpoint") else "checkpoint.mark.after:3"
    again = f";rank=0.1,at={point},do=kill" if point == "unlogged.resume" else ""
    job = keep(4, saving(tmp_path / "run"), transport="shm", log=PAIRS, faults=f"rank=1.0,at={first},do=kill{again}")
    values = job.values()
    assert [digest for digest, _ in values] == wanted
    assert {rank for rank, _ in job.deaths + job.taken_along} == {0, 1}
    assert [done for _, done in values[2:]] == [40, 40]  # the other group has done nothing twice
    assert all(done < 40 for _, done in values[:2])


def test_one_damaged_checkpoint_takes_its_group_back(keep: Keep, tmp_path: Path) -> None:
    program = saving(tmp_path / "run", held={0})
    wanted = [digest for digest, _ in keep(4, saving(tmp_path / "wanted"), transport="shm").values()]
    job = keep(4, program, transport="shm", log=PAIRS)
    job.run_until(lambda: all(job.marked(rank, "half") for rank in range(4)))
    newest = max(int(path.name[2:]) for path in (tmp_path / "run").glob("1-*"))
    for tag in (newest, newest + 5):  # it may be about to be overtaken
        damaged = tmp_path / "run" / f"1-{tag}"
        if damaged.exists():
            damaged.write_bytes(damaged.read_bytes()[:100])
    job.kill(0)
    assert [digest for digest, _ in job.values()] == wanted


def saving(folder: Path, **how: Any) -> Any:
    folder.mkdir()
    return checkpointed.saving(folder, **how)


@pytest.mark.parametrize("late", [False, True])
def test_death_at_the_end(keep: Keep, undisturbed: Any, late: bool) -> None:
    """What the others of its group have said to it is in no log: they start again as well, though they had ended."""

    def run(comm: Any, context: Context) -> list[str]:
        value = programs.everything(comm, context)
        if late:
            comm.leave()
            if comm.rank == 1 and context.incarnation == 0:
                os._exit(3)
        return value

    wanted = undisturbed(4, programs.everything, "shm")
    faults = "" if late else "rank=1.0,at=leave.send,do=kill"
    job = keep(4, run, transport="shm", log=PAIRS, faults=faults)
    assert job.values(120) == wanted
    assert (1, 0) in job.deaths


def test_different_groups_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    def run(group: Any, context: Context) -> str:
        log: Any = [[0, 1]] if context.rank else "inter-host"
        options = ftcomm.Options(policy="replay", timeout=20.0, log_dir=str(tmp_path / "log"), log=log)
        with pytest.raises(ftcomm.Mismatch) as caught:
            ftcomm.init(context.rank, 2, f"file://{tmp_path}/store", options, job="job")
        return str(caught.value)

    for text in ranks(2, run, direct=False):
        assert "log" in text
        assert "inter-host" in text
        assert "0,1" in text


def test_a_rank_that_is_not_there_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    def run(group: Any, context: Context) -> str:
        options = ftcomm.Options(policy="replay", timeout=20.0, log_dir=str(tmp_path / "log"), log=[[0, 7]])
        with pytest.raises(ftcomm.ConfigError) as caught:
            ftcomm.init(context.rank, 2, f"file://{tmp_path}/store", options, job="job")
        return str(caught.value)

    assert all("rank 7 is not below the world size 2" in text for text in ranks(2, run, direct=False))


# -- the longer ones


@pytest.mark.table
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 2], [1, 3]]])
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("point", [*POINTS, "result.before", "channel.send.logged", "channel.receive", "fence.after"])
def test_kill_of_each(
    keep: Keep, undisturbed: Any, point: str, victim: int, groups: list[list[int]], transport: str
) -> None:
    wanted = undisturbed(4, programs.everything, transport)
    job = keep(4, programs.everything, transport=transport, log=groups, faults=f"rank={victim}.0,at={point}:4,do=kill")
    assert job.values(120) == wanted


@pytest.mark.table
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_fifty_kills(keep: Keep, transport: str) -> None:
    def long_ring(comm: Any, context: Context) -> list[str]:
        return programs.ring(comm, context, steps=60_000, count=500)

    wanted = keep(4, long_ring, transport=transport).values(120)
    job = keep(4, long_ring, transport=transport, log=PAIRS)
    killed = job.kill_at_random(50, transport)
    assert job.values(120) == wanted
    assert killed == 50
