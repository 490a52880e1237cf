"""A replacement without its predecessor's log: on another (pretended) host, or on a disk that is empty."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keeper
import numpy as np
import programs
import pytest
from harness import Context, Failed
from keeper import Keeper
from tables import most
from test_checkpoints import digests, saving

import ftcomm

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")


def empty_disk(job: Keeper, rank: int) -> None:
    """Of the rank that has died."""
    for mark in job.folder.glob(f"*/rank-{rank}"):
        shutil.rmtree(mark.parent)


def another_host(job: Keeper, rank: int) -> None:
    there = dataclasses.replace(job.group.options, host=f"host-{rank}-{job.restarts}")
    before = job.group.options_of
    job.group.options_of = lambda r: there if r == rank else before(r)  # type: ignore[method-assign]


def the_first_time(how: Callable[[Keeper, int], None], victim: int = 1) -> Callable[[Keeper, int], None]:
    """Who dies again finds what the first replacement has got back."""

    def lose(job: Keeper, rank: int) -> None:
        if rank == victim and (victim, 0) == job.deaths[-1]:
            how(job, rank)

    return lose


def stages(comm: Any, context: Context, steps: int = 12) -> list[str]:
    """What a log on one host of several can be had again of: messages, and results that all ranks get."""
    n, me = comm.size, comm.rank
    state = np.random.default_rng(3 + me).standard_normal(programs.LARGE).astype(np.float32)
    history = []
    for step in range(steps):
        for count in (programs.SMALL, programs.MIDDLE, programs.LARGE):
            comm.all_reduce(state[:count], "avg")
            state[:count] += np.float32(0.01 * (me + 1) + step)
        comm.all_reduce(state[:1001], "avg", algorithm="ring-logged")
        state[:1001] += np.float32(0.01 * (me + 1) + step)
        part = state[: programs.MIDDLE].copy()
        comm.broadcast(part, step % n)
        gathered = np.zeros(n * 500, np.float32)
        comm.all_gather(gathered, state[:500].copy())
        state[: n * 500] += gathered
        total = part[:600].copy()
        comm.reduce(total, 0)
        if me == 0:
            state[:600] += total
        for count in (0, 10, programs.MIDDLE):
            got = np.zeros(count, np.float32)
            comm.ft_send(state[:count], (me + 1) % n, tag=count)
            comm.ft_recv(got, (me - 1) % n, tag=count)
            state[:count] += got * np.float32(0.25)
        comm.ft_send(state[:20], me, tag=99)
        own = np.zeros(20, np.float32)
        comm.ft_recv(own, me, tag=99)
        state[:20] += own
        comm.barrier()
        state *= np.float32(0.5)
        history.append(programs.digest(state))
    return history


@pytest.mark.parametrize("how", [empty_disk, another_host])
@pytest.mark.parametrize(
    "point", most(["channel.send.logged:14", "result.after:20"], ["channel.arrived:9", "flat.done:6"])
)
def test_replacement_is_fed_by_the_others(keep: Keep, undisturbed: Any, how: Any, point: str) -> None:
    wanted = undisturbed(3, stages, "tcp")
    faults = f"rank=1.0,at={point},do=kill"
    job = keep(3, stages, transport="tcp", faults=faults, heartbeat=2.0, on_death=the_first_time(how))
    assert job.values() == wanted
    assert job.deaths == [(1, 0)]


@pytest.mark.parametrize("point", ["restore.ask:1", "restore.record:1", "restore.record:40", "restore.done"])
def test_it_dies_again_while_it_is_fed(keep: Keep, undisturbed: Any, point: str) -> None:
    wanted = undisturbed(3, stages, "tcp")
    faults = f"rank=1.0,at=result.after:30,do=kill;rank=1.1,at={point},do=kill"
    job = keep(3, stages, transport="tcp", faults=faults, heartbeat=2.0, on_death=the_first_time(empty_disk))
    assert job.values() == wanted
    assert job.deaths == [(1, 0), (1, 1)]


@pytest.mark.parametrize("point", ["restore.reply:1", "restore.reply:4"])
def test_who_feeds_it_dies(keep: Keep, undisturbed: Any, point: str) -> None:
    wanted = undisturbed(3, stages, "tcp")
    faults = f"rank=1.0,at=result.after:30,do=kill;rank=2.0,at={point},do=kill"
    job = keep(3, stages, transport="tcp", faults=faults, heartbeat=2.0, on_death=the_first_time(another_host))
    assert job.values() == wanted
    assert {(1, 0), (2, 0)} <= set(job.deaths)


def test_one_after_another(keep: Keep, undisturbed: Any) -> None:
    """Each rank loses its log once, after the one before it is back."""
    wanted = undisturbed(3, stages, "tcp")
    faults = ";".join(f"rank={r}.0,at=result.after:{n},do=kill" for r, n in ((1, 20), (2, 45), (1, 70)))
    faults = (
        "rank=1.0,at=result.after:20,do=kill;rank=2.0,at=result.after:45,do=kill;rank=1.1,at=result.after:40,do=kill"
    )

    def lose(job: Keeper, rank: int) -> None:
        another_host(job, rank)

    job = keep(3, stages, transport="tcp", faults=faults, heartbeat=2.0, on_death=lose)
    assert job.values() == wanted
    assert [rank for rank, _ in job.deaths].count(1) == 2


def test_a_new_communicator_of_ranks_that_lost_their_logs(keep: Keep, undisturbed: Any) -> None:
    """It was in none of these logs: neither of the two has lost anything of it."""

    def with_another(comm: Any, context: Context) -> list[str]:
        history = stages(comm, context)
        other = comm.dup()
        x = np.full(100, comm.rank, np.float32)
        other.all_reduce(x, "sum")
        other.ft_send(x, (comm.rank + 1) % comm.size)
        got = np.zeros(100, np.float32)
        other.ft_recv(got, (comm.rank - 1) % comm.size)
        return [*history, programs.digest(x, got)]

    wanted = undisturbed(3, with_another, "tcp")
    faults = "rank=1.0,at=result.after:20,do=kill;rank=2.0,at=result.after:45,do=kill"
    job = keep(3, with_another, transport="tcp", faults=faults, heartbeat=2.0, on_death=another_host)
    assert job.values() == wanted
    job.died_only((1, 0), (2, 0))


def test_all_die_afterwards(keep: Keep, undisturbed: Any) -> None:
    """The log that was got back is one like any other: a new generation starts from it."""
    wanted = undisturbed(3, stages, "tcp")
    faults = (
        "rank=1.0,at=result.after:20,do=kill;"
        + ";".join(f"rank={r},at=restore.reply:3,do=kill" for r in (0, 2))
        + ";rank=1.1,at=restore.record:5,do=kill"
    )
    job = keep(3, stages, transport="tcp", faults=faults, heartbeat=2.0, on_death=the_first_time(empty_disk))
    assert job.values() == wanted


@pytest.mark.parametrize("how", [empty_disk, another_host])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_from_a_checkpoint(keep: Keep, tmp_path: Path, how: Any, mode: str) -> None:
    (tmp_path / "undisturbed").mkdir()
    wanted = digests(keep(3, saving(tmp_path / "undisturbed", anybody=False), transport="tcp").values())
    program = saving(tmp_path, anybody=False, held={1})
    job = keep(3, program, transport="tcp", log_mode=mode, heartbeat=2.0, on_death=the_first_time(how))
    job.run_until(lambda: job.marked(1, "half"))
    job.kill(1)
    values = job.values()
    assert digests(values) == wanted
    assert values[1][1] <= 25, "it has begun at the top"
    assert values[0][1] == 40


@pytest.mark.parametrize("how", [empty_disk, another_host])
def test_other_hosts_log_their_results_in_shares(keep: Keep, how: Any) -> None:
    """Two ranks on the first host: none of them has a large result whole, and it takes both to feed the one that is alone."""
    options: dict[str, Any] = {"transport": "auto", "hosts": ["two", "two", "one"], "heartbeat": 2.0}
    wanted = keep(3, stages, **options).values()
    job = keep(3, stages, faults="rank=2.0,at=result.after:40,do=kill", on_death=the_first_time(how, 2), **options)
    assert job.values() == wanted
    assert job.deaths == [(2, 0)]


# -- what nobody has


def refused(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, program: Any, size: int = 2, restarts: int = 1, **options: Any
) -> str:
    """What the replacement says when it cannot be fed."""
    monkeypatch.setattr(keeper, "MOST_RESTARTS", restarts)
    options = {"transport": "tcp", "on_death": another_host, **options}
    job = keep(size, program, heartbeat=2.0, **options)
    with pytest.raises(Failed) as caught:
        job.values()
    text = str(caught.value)
    assert "LogCorrupt" in text
    assert "Start the replacement where the log is; or start the job again" in text
    return text


def dies(comm: Any) -> None:
    if comm.rank == 1 and comm.job.incarnation == 0:
        Context.die()
    comm.barrier()


def test_receives_from_any_are_refused(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: Any) -> None:
        if comm.rank == 1:
            comm.ft_recv(bytearray(1), ftcomm.ANY)
        else:
            comm.ft_send(b"x", 1)
        comm.barrier()
        dies(comm)

    assert "received from ANY" in refused(keep, monkeypatch, lambda comm, _: program(comm))


def test_results_that_only_it_had_are_refused(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: Any) -> None:
        comm.all_to_all(np.zeros(20), np.ones(20))
        comm.barrier()
        dies(comm)

    text = refused(keep, monkeypatch, lambda comm, _: program(comm))
    assert "the result of operation #1, all_to_all" in text


def test_a_rank_with_a_fellow_on_its_host_is_refused(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: Any) -> None:
        comm.barrier()
        dies(comm)

    text = refused(keep, monkeypatch, lambda comm, _: program(comm), size=4, transport="hosts")
    assert "it was on the host of rank 0" in text


def test_a_rank_of_a_log_group_is_refused(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: Any) -> None:
        comm.barrier()
        dies(comm)

    text = refused(keep, monkeypatch, lambda comm, _: program(comm), size=3, restarts=4, log=[[0], [1, 2]])
    assert "it is in a log group with rank 2" in text


def test_two_at_once_are_refused(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: Any) -> None:
        comm.barrier()
        if comm.rank > 0 and comm.job.incarnation == 0:
            Context.die()
        comm.barrier()

    monkeypatch.setattr(keeper, "MOST_RESTARTS", 3)
    job = keep(3, lambda comm, _: program(comm), transport="tcp", heartbeat=2.0, on_death=another_host)
    with pytest.raises(Failed, match="has lost its log, too"):
        job.values()


def test_an_older_log_is_refused(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank has gone on elsewhere, and is started again where it first was."""
    steps = 20

    def program(comm: Any, context: Context) -> None:
        x = np.ones(100, np.float32)
        for step in range(steps):
            comm.all_reduce(x, "avg")
            if comm.rank == 1 and step == 5 + 5 * comm.job.incarnation < steps:
                Context.die()

    def move(job: Keeper, rank: int) -> None:
        if (rank, 0) == job.deaths[-1]:
            another_host(job, rank)
        elif (rank, 1) == job.deaths[-1]:
            home = dataclasses.replace(job.group.options, host=f"host-{rank}")
            before = job.group.options_of
            job.group.options_of = lambda r: home if r == rank else before(r)  # type: ignore[method-assign]

    monkeypatch.setattr(keeper, "MOST_RESTARTS", 2)
    job = keep(2, program, transport="tcp", heartbeat=2.0, on_death=move)
    with pytest.raises(Failed, match="on this host is an older one: the rank has logged on another host since"):
        job.values()
