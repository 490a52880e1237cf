"""Notes: a rank says by itself where it is, and its replacement goes on from there with a state that somebody else has."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from harness import Context
from keeper import Keeper
from tables import most
from test_lost_logs import another_host, empty_disk

import ftcomm

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")
STEPS, EVERY = 40, 7
LATE = 2  # steps later some messages are received


def noting(folder: Path, anybody: bool = True) -> Callable[[Any, Context], Any]:
    """Each step's state is in a file, which stands for the replica that has it. Returns its digest and the steps it made.

    Of the messages of a step one is received two steps later, so that at each note some are under way, and later ones have
    been received before them.
    """

    def program(comm: Any, context: Context) -> Any:
        n, me = comm.size, comm.rank
        right, left = (me + 1) % n, (me - 1) % n
        offset = np.full(10, me, np.float32)
        comm.all_reduce(offset)  # what every process does again
        start, x, late = 0, np.full(20_000, me + 1, np.float32) + offset[0], []
        if noted := comm.notes():
            comm.resume(noted[0], noted=True)
            context.mark("from a note", noted[0])
            start = noted[0]
        else:
            start = comm.resume_from(lambda tag: tag)[0] or 0
        if start > 0:
            with open(folder / f"{me}-{start}", "rb") as file:
                x, late = pickle.load(file)
        for step in range(start, STEPS):
            context.mark("step", step)
            comm.ft_send(x, right)
            comm.ft_send(x[:100] * np.float32(step), right, 7)
            y = np.empty_like(x)
            comm.ft_recv(y, ftcomm.ANY if anybody and step % 3 == 0 else left)
            x = x * np.float32(0.5) + y * np.float32(0.3) + np.float32(step)
            late.append(step)
            quiet = (step + 1) % EVERY == 0  # a checkpoint wants all messages received
            while late and (quiet or late[0] <= step - LATE):
                comm.ft_recv(y[:100], left, 7)
                x[:100] += y[:100] * np.float32(late.pop(0) + 1)
            comm.all_reduce(x, "avg")
            if step % 4 == 1:
                comm.broadcast(x[: 10 + step], step % n)
            if step % 5 == 2:
                comm.all_reduce(x[200:5000], "avg", algorithm="ring-logged")
            x += np.float32(me)
            with open(folder / f".{me}", "wb") as file:
                pickle.dump((x, late), file)
            os.replace(folder / f".{me}", folder / f"{me}-{step + 1}")
            if quiet:
                comm.commit_checkpoint(step + 1)
            comm.note(step + 1)
        return programs.digest(x), STEPS - start

    return program


def digests(values: list[Any]) -> list[str]:
    return [digest for digest, _ in values]


@pytest.fixture
def wanted(keep: Keep, tmp_path: Path) -> list[str]:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    return digests(keep(3, noting(folder), transport="shm").values())


def at_step(step: int) -> Callable[[Any], bool]:
    return lambda job: job.marked(1, "step") and job.marks(1, "step")[-1] >= step


@pytest.mark.parametrize(
    ("transport", "point"),
    most(
        [
            ("shm", "note.before:12"),
            ("tcp", "note.after:12"),
            ("shm", "result.after:30"),
            ("tcp", "channel.send.logged:40"),
        ],
        product(["shm", "tcp"], ["note.before:12", "note.after:12", "result.after:30", "channel.send.logged:40"]),
    ),
)
def test_a_replacement_goes_on_from_its_newest_note(
    keep: Keep, wanted: list[str], tmp_path: Path, transport: str, point: str
) -> None:
    job = keep(3, noting(tmp_path), transport=transport, faults=f"rank=1.0,at={point},do=kill")
    assert digests(job.values()) == wanted
    job.died_only((1, 0))
    (start,) = job.marks(1, "from a note")
    steps = job.marks(1, "step")
    assert steps[start - STEPS :] == [*range(start, STEPS)]
    died_in = steps[start - STEPS - 1]
    assert start == (died_in + 1 if point.startswith("note.after") else died_in)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.table) for seed in range(2, 9))])
def test_kills_at_random_moments(keep: Keep, wanted: list[str], tmp_path: Path, mode: str, seed: int) -> None:
    """On three hosts, so that messages may be logged late: a note that counts what was lost with its process does not hold."""
    hosts = [f"host-{rank}" for rank in range(3)]
    job = keep(3, noting(tmp_path), transport="tcp", hosts=hosts, log_mode=mode)
    killed = [job.kill_at_random(5, f"{seed} {mode}")]
    assert digests(job.values()) == wanted
    assert len(job.deaths) >= killed[0]


def test_all_die_and_each_goes_on_from_its_own(keep: Keep, wanted: list[str], tmp_path: Path) -> None:
    job = keep(3, noting(tmp_path), transport="shm")
    job.run_until(lambda: at_step(15)(job))  # far from the next checkpoint, between which and its note there is none
    for rank in range(3):
        job.kill(rank)
    assert digests(job.values()) == wanted
    assert all(job.marked(rank, "from a note") for rank in range(3))


@pytest.mark.parametrize("how", [empty_disk, another_host])
def test_notes_of_a_lost_log_do_not_count(keep: Keep, wanted: list[str], tmp_path: Path, how: Any) -> None:
    """Without receives from anyone, whose answers would be lost."""
    hosts = [f"host-{rank}" for rank in range(3)]
    job = keep(
        3,
        noting(tmp_path, anybody=False),
        transport="tcp",
        hosts=hosts,
        faults="rank=1.0,at=note.after:12,do=kill",
        on_death=lambda job, rank: how(job, rank) if len(job.deaths) == 1 else None,
    )
    assert digests(job.values()) == wanted
    assert [step for step in job.marks(1, "step") if job.marks(1, "step").count(step) > 1][:1] == [7], (
        "from its checkpoint"
    )


def test_a_damaged_note_does_not_count(keep: Keep, wanted: list[str], tmp_path: Path) -> None:
    def spoil(job: Keeper, rank: int) -> None:
        (segment,) = job.folder.glob(f"*/*-{rank}-{job.size + 5}/*1")  # after five other streams that a rank has
        with open(segment, "r+b") as file:
            file.seek(file.read().index(b"\x02\x00\x00\x0012") + 4)  # the tag of its newest
            file.write(b"21")

    job = keep(3, noting(tmp_path), transport="shm", faults="rank=1.0,at=note.after:12,do=kill", on_death=spoil)
    assert digests(job.values()) == wanted
    assert not job.marked(1, "from a note"), "what comes before a damaged one is not looked for"
    assert job.marks(1, "step").count(7) == 2


def test_wrong_use_is_told(ranks: Any) -> None:
    def run(comm: Any) -> list[str]:
        told = []

        def while_open() -> None:
            if comm.rank == 1:  # when the other one has tried
                comm.ft_recv(bytearray(5), 0)
            request = comm.ibarrier()
            try:
                comm.note(1)
            finally:
                if comm.rank == 0:
                    comm.ft_send(b"tried", 1)
                request.wait()

        for call in (
            lambda: comm.note(0),
            lambda: comm.resume("nowhere", noted=True),
            lambda: comm.note(3.5),
            while_open,
        ):
            if call is while_open:
                comm.resume(None)
            try:
                call()
            except ftcomm.ConfigError as error:
                told.append(str(error))
        comm.note("here")
        assert comm.notes()[0] == "here"
        return told

    told = ranks(2, run, policy="replay", transport="shm")[0]
    for text, part in zip(told, ["resume() first", "no note", "string or an integer", "Wait for all"], strict=True):
        assert part in text
