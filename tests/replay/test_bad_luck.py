"""Logs that are full, damaged, or not this job's: a clear error, and nothing that was logged is lost or overwritten."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from collective_values import different
from harness import Context, Ranks
from keeper import Keeper

import ftcomm

Keep = Callable[..., Keeper]
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("pulls")


def message(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, MIB, np.uint8)


# -- no room


def send_until_full(comm: Any, context: Context) -> tuple[str, int, int]:
    """Rank 0 sends until its log is full; rank 1 gets all that was sent; a checkpoint makes room, and on it goes."""
    comm.resume(None)
    count, counts, text = np.zeros(2, np.int64), [], ""
    comm.all_reduce(count)
    for again in range(2):
        count[:] = 0
        if comm.rank == 0:
            # To itself: the log of a receiver on another host has its own limit, and is not to be full before the sender's.
            for _ in range(4):
                comm.ft_send(message(0), 0)
                comm.ft_recv(np.zeros(MIB, np.uint8), 0)
            try:
                while count[again] < 100:
                    comm.ft_send(message(int(count[again])), 1)
                    count[again] += 1
            except ftcomm.LogFull as full:
                text = str(full)
        comm.all_reduce(count)
        if comm.rank == 1:
            for number in range(count[again]):
                got = np.zeros(MIB, np.uint8)
                comm.ft_recv(got, 0)
                assert (got == message(number)).all(), number
        counts.append(int(count[again]))
        for tag in range(3):  # the log keeps what the newest two need
            comm.commit_checkpoint(f"{again}.{tag}")
        comm.barrier()  # rank 1, too, has given up what it received
    return text, counts[0], counts[1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_full_log_loses_nothing(ranks: Ranks, transport: str) -> None:
    (text, first, second), _ = ranks(2, send_until_full, policy="replay", transport=transport, log_limit=24 * MIB)
    assert 8 < first < 24
    assert second > first / 2
    assert "(log_limit) are taken" in text
    assert "Raise log_limit, commit_checkpoint more often, or give a folder on disk to spill to" in text


def test_after_a_full_log_there_is_room_for_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Its result and its mark are the first that this process notes behind the resume point."""

    def run(comm: Any, context: Context) -> int:
        comm.resume(None)
        if comm.rank == 0:
            for sent in range(100):
                try:
                    comm.ft_send(message(0), 1)
                except ftcomm.LogFull as full:
                    assert "are kept for results, answers and checkpoints" in str(full)
                    (tmp_path / "sent").write_text(str(sent))
                    break
            context.mark("full")
        else:
            context.hold()
            for _ in range(int((tmp_path / "sent").read_text())):
                comm.ft_recv(np.zeros(MIB, np.uint8), 0)
        for tag in range(3):
            comm.commit_checkpoint(tag)
        comm.barrier()
        if comm.rank == 0:
            comm.ft_send(message(0), 1)
        else:
            comm.ft_recv(np.zeros(MIB, np.uint8), 0)
        return int((tmp_path / "sent").read_text())

    group = ranks.start(2, run, policy="replay", transport="shm", log_limit=64 * MIB)
    group.wait_for(0, "full")
    group.release(1)
    sent, _ = Ranks.values(group)
    assert 40 < sent < 64


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "of another program", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(disk).f_bavail == 0


def test_full_disk_loses_nothing(ranks: Ranks, small_disk: Path) -> None:
    (text, first, second), _ = ranks(
        2, send_until_full, policy="replay", transport="shm", log_dir=str(small_disk / "log")
    )
    assert 4 < first < 24
    assert second > first / 2
    assert "No space left on device. Make room there, give the log another place" in text


def test_full_disk_and_a_replacement_that_needs_none(keep: Keep, small_disk: Path) -> None:
    """It looks at streams that were never used, and may not want room for that."""

    def program(comm: Any, context: Context) -> float:
        x, got = np.ones(4), np.zeros(MIB, np.uint8)
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.ft_send(message(1), 1)
        else:
            comm.ft_recv(got, 0)
            context.mark("received")
            if context.incarnation == 0:
                context.hold()
        comm.all_reduce(x)
        return float(x[0] + got[0])

    job = keep(2, program, transport="shm", log_dir=str(small_disk / "log"), heartbeat=2.0)
    job.run_until(lambda: job.marked(1, "received"))
    fill(small_disk)
    job.kill(1)
    assert job.values() == [4.0, 4.0 + message(1)[0]]


def test_full_disk_and_a_communicator_that_is_made_then(ranks: Ranks, small_disk: Path) -> None:
    """What is free in the log gives room to its streams; then it says what to do."""

    def run(comm: Any) -> str:
        x = np.ones(4)
        comm.all_reduce(x)
        if comm.rank == 0:
            fill(small_disk)
        with pytest.raises(ftcomm.LogFull) as full:
            for _ in range(100):
                comm.barrier()
                comm.dup().all_reduce(x)
        return str(full.value)

    told = ranks(2, run, policy="replay", transport="shm", log_dir=str(small_disk / "log"))
    assert any("No space left on device. Make room there, give the log another place" in text for text in told), told


def test_full_log_of_one_rank_is_told_to_all(ranks: Ranks) -> None:
    """Rank 1 cannot log the result of an all-reduce: nobody takes it for done."""

    def run(comm: Any) -> tuple[str, list[float]]:
        x = np.full(3 * MIB, comm.rank, np.float32)  # more than what messages leave to results
        comm.all_reduce(x[:1].copy())
        if comm.rank == 1:
            with pytest.raises(ftcomm.LogFull):
                for _ in range(100):
                    comm.ft_send(message(0), 1)
        with pytest.raises(ftcomm.LogFull) as full:
            comm.all_reduce(x)
        return str(full.value), different(x)

    for rank, (text, values) in enumerate(ranks(3, run, policy="replay", transport="shm", log_limit=32 * MIB)):
        assert ("Here: the log" in text and "(log_limit) are taken" in text) == (rank == 1), text
        assert set(values) <= {float(rank), 3.0}, "neither the input nor the sum"


def test_a_folder_whose_name_is_no_text(ranks: Ranks, tmp_path: Path) -> None:
    def run(comm: Any) -> float:
        x = np.ones(4)
        comm.all_reduce(x)
        return float(x[0])

    place = os.fsdecode(os.fsencode(tmp_path) + b"/\xff log")
    assert ranks(2, run, policy="replay", transport="shm", log_dir=place) == [2.0, 2.0]


# -- damage


def test_flipped_bit_in_a_logged_message(keep: Keep) -> None:
    """Its receiver had it, died, and its replacement reads it again: told, and not computed with."""

    def program(comm: Any, context: Context) -> None:
        got = np.zeros(MIB, np.uint8)
        if comm.rank == 0:
            for number in range(3):
                comm.ft_send(message(number), 1)
            context.hold()
        for number in range(3):
            try:
                comm.ft_recv(got, 0)
            except ftcomm.LogCorrupt as error:
                context.mark("told", (number, str(error)))
                context.hold()
            assert (got == message(number)).all()
        context.mark("received")
        context.hold()

    job = keep(2, program, transport="shm", heartbeat=2.0)
    job.run_until(lambda: job.marked(1, "received"))
    flipped = 0
    for segment in job.folder.glob("*/*-0-1/0*"):
        with open(segment, "r+b") as file:
            data = file.read()
            at = data.find(message(1).tobytes()[:64])
            if at >= 0:
                flipped += 1
                file.seek(at + 5000)
                file.write(bytes([data[at + 5000] ^ 4]))
    assert flipped == 1
    job.kill(1)
    job.run_until(lambda: job.marked(1, "told"))
    (number, text), *_ = [mark[2] for mark in job.group._marks if mark[1] == "told"]
    assert number == 1
    assert "record 2 of the log 0->1" in text
    assert "is damaged" in text


# -- of another job


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("what", ["job", "version", "world size"])
def test_log_that_is_not_this_jobs(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """As with FTCOMM_LOG_DIR set by hand to the folder of an earlier run, which was killed."""
    folder = tmp_path / "log"
    monkeypatch.setenv("FTCOMM_LOG_OWNER", "launcher")

    def run(comm: Any, context: Context) -> None:
        comm.ft_send(message(comm.rank), 1 - comm.rank)
        context.mark("sent")
        context.hold()

    def refused(group: Any, context: Context) -> str:
        with pytest.raises(ftcomm.LogCorrupt) as error:
            ftcomm.init(context.rank, group.size, store=group.store(), job=group.job, options=group.options, timeout=20)
        return str(error.value)

    first = ranks.start(2, run, policy="replay", transport="shm", log_dir=str(folder))
    for rank in range(2):
        first.wait_for(rank, "sent")
    first.abort()
    if what == "version":
        for identity in folder.glob("*/job"):
            identity.write_text(identity.read_text().replace("version 2", "version 1"))
    before = listing(folder)
    size = 3 if what == "world size" else 2
    for text in ranks(size, refused, direct=False, policy="replay", transport="shm", log_dir=str(folder)):
        assert str(folder) in text
        assert ("version 1 of the format" in text) == (what == "version")
        assert "remove the folder" in text if what == "version" else "give it another folder" in text
    assert listing(folder) == before


# -- durability "host"


def test_every_record_is_on_stable_storage(keep: Keep, undisturbed: Any, tmp_path: Path) -> None:
    """Kills as with durability "process"; and no watermark is ahead of what has been synced."""
    wanted = undisturbed(3, programs.everything, "shm")
    faults = "rank=1,at=channel.send.logged:9,do=kill; rank=2,at=result.after:20,do=kill"
    options: dict[str, Any] = {"durability": "host", "log_dir": str(tmp_path / "log"), "heartbeat": 2.0}
    job = keep(3, programs.everything, transport="shm", faults=faults, **options)
    assert job.values() == wanted
    assert {rank for rank, _ in job.deaths} == {1, 2}
    streams = 0
    for index in (tmp_path / "log").glob("*/*/index"):
        words = index.read_bytes()
        sent, synced = (int.from_bytes(words[at : at + 8], "little") for at in (64, 144))
        assert synced == sent, index
        streams += sent > 0
    assert streams > 6
