"""Checkpoints under replay: they bound the log and what a replacement does again; the output stays that of an undisturbed run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from harness import Context
from keeper import Keeper

import ftcomm

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")


def saving(
    folder: Path,
    steps: int = 40,
    every: int = 5,
    count: int = 20_000,
    anybody: bool = True,
    held: Collection[int] = (),
) -> Callable[[Any, Context], Any]:
    """A program with a prologue, a loop, and a checkpoint now and then; returns its digest and how often this process stepped.

    ``held``: ranks that wait in the middle to be killed: from outside, else, it may be too late.
    """

    def program(comm: Any, context: Context) -> Any:
        n, me = comm.size, comm.rank
        offset = np.full(10, me, np.float32)
        comm.all_reduce(offset)  # what every process does again
        comm.ft_send(offset, (me + 1) % n)
        comm.ft_recv(offset, (me - 1) % n)

        def load(tag: Any) -> Any:
            with open(folder / f"{me}-{tag}", "rb") as file:
                return pickle.load(file)

        start, x = comm.resume_from(load)
        if start is None:
            start, x = 0, np.full(count, me + 1, np.float32) + offset[0]
        context.mark("resumed", start)
        done = 0
        for step in range(start, steps):
            comm.ft_send(x, (me + 1) % n)
            y = np.empty_like(x)
            comm.ft_recv(y, ftcomm.ANY if step % 3 == 0 and anybody else (me - 1) % n)
            x = x * np.float32(0.5) + y * np.float32(0.3) + np.float32(step)
            comm.all_reduce(x, "avg")
            x += np.float32(me)
            done += 1
            if (step + 1) % every == 0:
                with open(folder / f".{me}", "wb") as file:
                    pickle.dump(x, file)
                os.replace(folder / f".{me}", folder / f"{me}-{step + 1}")
                comm.commit_checkpoint(step + 1)
            if step == steps // 2:
                context.mark("half")
                if me in held and context.incarnation == 0:
                    context.hold()
        return programs.digest(x), done

    return program


def digests(values: list[Any]) -> list[str]:
    return [digest for digest, _ in values]


@pytest.fixture
def wanted(keep: Keep, tmp_path: Path) -> list[str]:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    return digests(keep(3, saving(folder), transport="shm").values())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_replacement_goes_on_from_the_newest(keep: Keep, wanted: Any, tmp_path: Path, transport: str) -> None:
    job = keep(3, saving(tmp_path, held={1}), transport=transport)
    job.run_until(lambda: job.marked(1, "half"))
    job.kill(1)
    values = job.values()
    assert digests(values) == wanted
    assert values[1][1] <= 25, "it has begun at the top"
    assert values[0][1] == 40


def test_all_die(keep: Keep, wanted: Any, tmp_path: Path) -> None:
    job = keep(3, saving(tmp_path, held={0, 1, 2}), transport="shm")
    job.run_until(lambda: all(job.marked(rank, "half") for rank in range(3)))
    for rank in range(3):
        job.kill(rank)
    values = job.values()
    assert digests(values) == wanted
    assert all(done <= 25 for _, done in values)


@pytest.mark.parametrize(
    "point", ["checkpoint.resume:1", "result.before:12", "result.after:12", "checkpoint.mark.after:3"]
)
def test_a_world_of_one(keep: Keep, tmp_path: Path, point: str) -> None:
    """What it calls goes to nobody, and is in its log all the same: what comes later has its number there."""
    (tmp_path / "undisturbed").mkdir()
    first = digests(keep(1, saving(tmp_path / "undisturbed")).values())
    job = keep(1, saving(tmp_path), faults=f"rank=0.0,at={point},do=kill")
    assert digests(job.values()) == first
    assert job.deaths == [(0, 0)]


def test_damaged_checkpoint_the_one_before_is_used(keep: Keep, wanted: Any, tmp_path: Path) -> None:
    """L4, and that it is said."""
    job = keep(3, saving(tmp_path, held={1}), transport="shm")
    job.run_until(lambda: job.marked(1, "half"))
    job.kill(1)
    newest = max((int(path.name[2:]) for path in tmp_path.glob("1-*")), default=0)
    (tmp_path / f"1-{newest}").write_bytes(b"half a pick")
    assert digests(job.values()) == wanted
    log = job.group._processes[1, 1].result.log
    assert "trying the one before" in log or f"{newest}" not in log


@pytest.mark.parametrize("point", ["checkpoint.resume", "checkpoint.mark.before", "checkpoint.mark.after", "checkpoint.collect",
                                   "log.collect.before", "log.collect.after", "log.ack"])  # fmt: skip
@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.table), 3])
@pytest.mark.sample(3)
def test_kill_in_a_checkpoint(keep: Keep, wanted: Any, tmp_path: Path, point: str, nth: int) -> None:
    nth = 1 if point == "checkpoint.resume" else nth  # it is passed once
    job = keep(3, saving(tmp_path), transport="shm", faults=f"rank=1,at={point}:{nth},do=kill", heartbeat=2.0)
    assert digests(job.values()) == wanted
    assert (1, 0) in job.deaths


def test_log_is_bounded(ranks: Any, tmp_path: Path) -> None:
    """Ten times as long: the log takes no more memory than it did after the first checkpoints."""

    def run(comm: Any, context: Context) -> list[int]:
        comm.resume(None)
        x, taken = np.ones(100_000, np.float32), []
        for step in range(200):
            comm.all_reduce(x, "avg")
            comm.ft_send(x, (comm.rank + 1) % comm.size)
            comm.ft_recv(x, (comm.rank - 1) % comm.size)
            if step % 5 == 4:
                comm.commit_checkpoint(step)
                taken.append(comm.job.info()["log"]["resident"])
        return taken

    for taken in ranks(2, run, policy="replay", transport="shm", log_limit=256 << 20):
        assert max(taken[8:]) <= max(taken[:8])


def test_what_was_said_elsewhere_has_checkpoints_of_its_own(ranks: Any) -> None:
    """A replacement that goes on from this one would begin anew there. Before resume, all do it again; and it may be closed."""

    def program(comm: Any) -> None:
        x = np.ones(8)
        before, used, marked = comm.dup(), comm.dup(), comm.dup()
        for one in (before, used, marked):
            one.all_reduce(x)
        marked.resume()
        comm.resume()
        comm.commit_checkpoint(1)
        marked.all_reduce(x)
        marked.commit_checkpoint(2)
        comm.commit_checkpoint(2)
        if comm.rank == 0:
            used.send(x, 1)
        if comm.rank == 1:
            used.recv(x, 0)
        with pytest.raises(ftcomm.ConfigError, match=r"ranks \[0, 1\] have used .* since resume") as refused:
            comm.commit_checkpoint(3)
        assert refused.value.ranks == (0, 1)
        assert (used.name in str(refused.value)) == (comm.rank < 2)
        if comm.rank < 2:
            with pytest.raises(ftcomm.ConfigError, match="have been used"):
                comm.note("here")
        used.close()
        comm.commit_checkpoint(3)
        comm.note("here")

    ranks(3, program, policy="replay")


def test_what_is_not_quiet_is_refused_everywhere(ranks: Any) -> None:
    def run(comm: Any) -> str:
        comm.resume(None)
        if comm.rank == 0:
            comm.ft_send(b"left over", 1)
        try:
            comm.commit_checkpoint("early")
        except ftcomm.ConfigError as error:
            message = str(error)
        if comm.rank == 1:
            comm.ft_recv(bytearray(9), 0)
        comm.commit_checkpoint("late")
        return message

    for message in ranks(2, run, policy="replay", transport="shm"):
        assert "from rank 0 to rank 1 have not been received" in message


def test_wrong_use_is_told(ranks: Any) -> None:
    def run(comm: Any) -> list[str]:
        told = []
        for call in (
            lambda: comm.commit_checkpoint("first"),
            lambda: comm.resume("nowhere"),
            lambda: comm.commit_checkpoint(3.5),
            lambda: (comm.resume(None), comm.resume(None)),
            lambda: comm.commit_checkpoint(f"tag of rank {comm.rank}"),
        ):
            with pytest.raises(ftcomm.ConfigError) as caught:
                call()
            told.append(str(caught.value))
        return told

    for told in ranks(2, run, policy="replay", transport="shm"):
        for text, part in zip(
            told,
            ["resume() first", "no checkpoint", "string or an integer", "call it once", "gave another tag"],
            strict=True,
        ):
            assert part in text
