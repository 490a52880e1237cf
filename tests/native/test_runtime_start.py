"""The runtime through the C interface: forming a job, its errors, and what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import native_ranks as nr
import pytest


def name() -> str:
    return f"runtime-{os.getppid()}-{os.environ.get('PYTEST_CURRENT_TEST', '').split('::')[-1].split(' ')[0]}"


def start(ranks: nr.Ranks, size: int, body: Callable[[nr.Channel, nr.Job], Any], **options: Any) -> None:
    def run(channel: nr.Channel, rank: int) -> Any:
        job = nr.Job(name(), rank, size, channel.exchange, **options)
        try:
            return body(channel, job)
        finally:
            job.close()

    for rank in range(size):
        ranks.spawn(rank, partial(run, rank=rank))
    ranks.exchange(range(size))


def descriptors() -> set[str]:
    own = "/proc/self/fd/"
    return {os.readlink(own + fd) for fd in os.listdir(own) if os.path.lexists(own + fd)}


def threads() -> list[str]:
    """The library's own, by name (a sanitizer has some, too). One that was joined is listed for a moment more: the
    kernel wakes the joiner first."""
    until = time.monotonic() + nr.DEADLINE
    while True:
        names = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
        ours = sorted(name for name in names if name.startswith("ftcomm"))
        if not ours or time.monotonic() > until:
            return ours
        os.sched_yield()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduce(ranks: nr.Ranks, size: int, transport: str) -> None:
    def body(_: nr.Channel, job: nr.Job) -> Any:
        comm = job.comm()
        out = [job.all_reduce(comm, [float(job.rank + 1), 2.0] * count) for count in (1, 500, 200_000)]
        job.barrier(comm)
        links = job.info()["links"]
        job.leave()
        return [(o[0], o[-1], len(o)) for o in out], links

    start(ranks, size, body, transport=transport)
    total = size * (size + 1) / 2
    for rank in range(size):
        out, links = ranks.result(rank)
        assert out == [(total, 2.0 * size, 2), (total, 2.0 * size, 1000), (total, 2.0 * size, 400_000)]
        assert links == ["self" if r == rank else transport for r in range(size)]


def test_nothing_is_left_after_close(ranks: nr.Ranks) -> None:
    def run(channel: nr.Channel, rank: int) -> Any:
        nr.load()
        before = descriptors()
        for turn in range(3):
            job = nr.Job(f"{name()}-{turn}", rank, 2, channel.exchange, transport="auto")
            job.all_reduce(job.comm(), [1.0])
            if turn != 1:
                job.leave()
            else:
                channel.send("used")
                channel.receive()  # without leave: nobody may still be in the all-reduce
            job.close()
            with open("/proc/self/maps") as maps:
                mapped = [line for line in maps if "memfd:ftcomm" in line]
            assert mapped == []
            assert (descriptors(), threads()) == (before, [])
        return True

    for rank in range(2):
        ranks.spawn(rank, partial(run, rank=rank))
    for turn in range(3):
        ranks.exchange(range(2))
        if turn == 1:
            assert [ranks.receive(rank) for rank in range(2)] == ["used"] * 2
            for rank in range(2):
                ranks.send(rank, "close")
    assert ranks.result(0)
    assert ranks.result(1)


def test_two_jobs_in_one_process(ranks: nr.Ranks) -> None:
    def run(channel: nr.Channel, rank: int) -> Any:
        first = nr.Job(name() + "-a", rank, 2, channel.exchange)
        second = nr.Job(name() + "-b", 1 - rank, 2, channel.exchange)
        a, b = first.comm(), second.comm()
        outs: dict[str, list[float]] = {}

        def use(key: str, job: nr.Job, comm: int) -> None:
            for _ in range(50):
                outs[key] = job.all_reduce(comm, [float(job.rank), 1.0])

        users = [threading.Thread(target=use, args=args) for args in (("a", first, a), ("b", second, b))]
        for user in users:
            user.start()
        for user in users:
            user.join()
        first.leave()
        first.close()
        outs["c"] = second.all_reduce(b, [5.0])
        second.leave()
        second.close()
        return outs

    for rank in range(2):
        ranks.spawn(rank, partial(run, rank=rank))
    ranks.exchange(range(2))
    blobs = [ranks.receive(rank) for rank in range(2)]
    for rank in range(2):
        ranks.send(rank, (blobs[::-1], 78))
    for rank in range(2):
        assert ranks.result(rank) == {"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [10.0]}


def test_the_missing_rank_is_named(ranks: nr.Ranks) -> None:
    """Rank 2 has published its address and then never starts: rank 0, whose time is up first, says so to rank 1."""

    def run(channel: nr.Channel, rank: int) -> Any:
        def exchange(blob: bytes) -> Any:
            out = channel.exchange(blob)
            if rank == 2:
                channel.receive()
            return out

        with pytest.raises(nr.Error) as error:
            nr.Job(name(), rank, 3, exchange, start_timeout=(0.5, 60.0, 0.01)[rank])
        return error.value.code, error.value.detail["ranks"]

    for rank in range(3):
        ranks.spawn(rank, partial(run, rank=rank))
    ranks.exchange(range(3))
    for rank in range(2):
        assert ranks.result(rank) == (nr.TIMEOUT, [2])
    ranks.send(2, "go on")
    assert ranks.result(2)[0] != nr.OK


def test_a_start_can_be_interrupted_and_resumed(ranks: nr.Ranks) -> None:
    def run(channel: nr.Channel, rank: int) -> Any:
        if rank == 1:

            def late(blob: bytes) -> Any:
                out = channel.exchange(blob)
                channel.receive()
                return out

            nr.Job(name(), 1, 2, late)
            channel.receive()
            return None

        caught: list[int] = []
        signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
        signal.siginterrupt(signal.SIGUSR1, True)
        codes: list[int] = []

        class Patient(nr.Job):
            is_interruptible = True

            def check(self, code: int) -> None:
                codes.append(code)
                if code != nr.INTERRUPTED:
                    super().check(code)

        poke = pulse(threading.get_ident())
        job = Patient(name(), 0, 2, channel.exchange)
        poke.set()
        assert codes[-1] == nr.INTERRUPTED
        channel.send("interrupted")
        blank = (ctypes.c_char_p * 2)(), (ctypes.c_size_t * 2)()
        start = job.c.ft_job_start
        code = nr.INTERRUPTED
        while code == nr.INTERRUPTED:
            code = start(job.handle, *blank, ctypes.c_uint64(0), 0, ctypes.c_double(0))
        return code, caught[:1], job.info()["running"]

    for rank in range(2):
        ranks.spawn(rank, partial(run, rank=rank))
    ranks.exchange(range(2))
    assert ranks.receive(0) == "interrupted"
    ranks.send(1, "go on")
    assert ranks.result(0) == (nr.OK, [1], True)


def pulse(thread: int) -> threading.Event:
    """Signals a thread over and over until the event is set: one that comes between two system calls interrupts nothing."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.001):
            signal.pthread_kill(thread, signal.SIGUSR1)

    threading.Thread(target=run).start()
    return stop


@pytest.mark.parametrize(
    "variable",
    [
        "FTCOMM_FLAT_LIMIT",
        "FTCOMM_PULL_LIMIT",
        "FTCOMM_REDUCE_PULL_LIMIT",
        "FTCOMM_SEGMENT_BYTES",
        "FTCOMM_EAGER_LIMIT",
        "FTCOMM_STREAM_LIMIT",
        "FTCOMM_STAGE_LIMIT",
        "FTCOMM_POST_LIMIT",
    ],
)
def test_another_table_is_an_error_at_start(ranks: nr.Ranks, variable: str) -> None:
    """C8: the algorithm is part of the operation."""

    def run(channel: nr.Channel, rank: int) -> Any:
        if rank == 1:
            os.environ[variable] = "4095" if variable == "FTCOMM_POST_LIMIT" else "8192"
        with pytest.raises(nr.Error) as error:
            nr.Job(name(), rank, 2, channel.exchange)
        return error.value.code, f" {variable.removeprefix('FTCOMM_').lower()} " in error.value.detail["message"]

    for rank in range(2):
        ranks.spawn(rank, partial(run, rank=rank))
    ranks.exchange(range(2))
    assert ranks.result(0) == ranks.result(1) == (nr.MISMATCH, True)


def test_another_policy_is_an_error_at_start(ranks: nr.Ranks) -> None:
    """The leader's would hold for all: who was told to raise would go on without the dead."""

    def run(channel: nr.Channel, rank: int) -> Any:
        with pytest.raises(nr.Error) as error:
            nr.Job(name(), rank, 2, channel.exchange, policy=rank)
        return error.value.code, sorted(set(error.value.detail["message"].split()) & {"raise,", "lossy,", "policy"})

    for rank in range(2):
        ranks.spawn(rank, partial(run, rank=rank))
    ranks.exchange(range(2))
    assert [ranks.result(rank) for rank in range(2)] == [
        (nr.MISMATCH, ["lossy,", "policy"]),
        (nr.MISMATCH, ["policy", "raise,"]),
    ]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rank": 2}, "rank"),
        ({"size": 0, "rank": 0}, "world size"),
        ({"size": 5000}, "world size"),
        ({"heartbeat": 0.0}, "heartbeat"),
        ({"heartbeat": float("nan")}, "heartbeat"),
        ({"transport": "pigeon"}, "transport"),
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"faults": "rank=0,at=nowhere,do=kill"}, "nowhere"),
        ({"faults": "rank=2,at=step:1,do=kill"}, "rank=2: the job has only 2 ranks"),
    ],
)
def test_bad_configuration(change: dict[str, Any], word: str) -> None:
    def exchange(_: bytes) -> Any:
        raise AssertionError("it was accepted")

    arguments: dict[str, Any] = {"name": "job", "rank": 0, "size": 2, "exchange": exchange, **change}
    with pytest.raises(nr.Error) as error:
        nr.Job(**arguments)
    assert error.value.code == nr.INVALID
    assert word in error.value.detail["message"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FTCOMM_FLAT_LIMIT", "1048577"),
        ("FTCOMM_POST_LIMIT", "16385"),
        ("FTCOMM_PULL_LIMIT", "0"),
        ("FTCOMM_REDUCE_PULL_LIMIT", "-1"),
        ("FTCOMM_REDUCE_PULL_LIMIT", "1M"),
        ("FTCOMM_REDUCE_PULL_LIMIT", str((1 << 40) + 1)),
    ],
)
def test_a_wrong_size_is_an_error(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(_: bytes) -> Any:
        raise AssertionError("it was accepted")

    monkeypatch.setenv(variable, value)
    with pytest.raises(nr.Error) as error:
        nr.Job("job", 0, 2, exchange)
    assert error.value.code == nr.INVALID
    assert f"{variable}={value}: give a number of bytes from " in error.value.detail["message"]


@pytest.mark.parametrize("damage", ["garbage", "truncated", "version", "own"])
def test_damaged_addresses_are_refused(damage: str) -> None:
    def exchange(blob: bytes) -> Any:
        other = {
            "garbage": os.urandom(300),
            "truncated": blob[:-1],
            "version": blob[:4] + struct.pack("<I", 99) + blob[8:],
            "own": blob,  # rank 0's where rank 1's belongs
        }[damage]
        return [blob, other], 1

    with pytest.raises(nr.Error) as error:
        nr.Job("job", 0, 2, exchange)
    assert error.value.code == nr.INVALID
    assert "rank 1" in error.value.detail["message"]


def test_loading_the_library_starts_nothing(ranks: nr.Ranks) -> None:
    def run(_: nr.Channel) -> Any:
        before = descriptors(), len(os.listdir("/proc/self/task"))
        library = nr.load()
        library.ft_build_info()
        library.ft_fault_points()
        return (descriptors(), len(os.listdir("/proc/self/task"))) == before

    ranks.spawn(0, run)
    assert ranks.result(0)
