"""The runtime through the C interface: deaths, stops, forks, signals and broken memory."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

import native_ranks as nr
import pytest


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("busy", [True, False])
def test_a_kill_is_noticed_by_the_robust_futex(ranks: nr.Ranks, size: int, busy: bool) -> None:
    """busy: the survivors wait in an all-reduce that the victim never enters; else no thread of theirs is in the library."""
    victim = size - 1

    def body(channel: nr.Channel, job: nr.Job, comm: int) -> Any:
        if job.rank == victim:
            channel.receive()
        if busy:
            out = job.all_reduce(comm, [1.0])
        event = job.wait_event("removed", slot=victim)
        if not busy:
            out = job.all_reduce(comm, [1.0])
        alive = job.alive()
        job.leave()
        job.close()
        return event["evidence"], alive, out

    ranks.start(size, body)
    ranks.kill(victim)
    for rank in range(victim):
        evidence, alive, out = ranks.result(rank)
        assert evidence in ("robust-futex", "pidfd")
        assert alive == list(range(victim))
        assert out == [float(victim)]


def test_the_evidence_comes_from_the_robust_futex(ranks: nr.Ranks) -> None:
    """The victim holds memory, so that the pidfd, which waits until it is freed, comes later."""

    def body(channel: nr.Channel, job: nr.Job, _: int) -> Any:
        if job.rank == 1:
            held = bytearray(256 << 20)
            held[::4096] = b"x" * len(held[::4096])
            channel.send("full")
            channel.receive()
        return job.wait_event("removed", slot=1)["evidence"]

    ranks.start(2, body)
    assert ranks.receive(1) == "full"
    ranks.kill(1)
    assert ranks.result(0) == "robust-futex"


def test_closing_without_leaving_is_noticed_by_who_needs_it(ranks: nr.Ranks) -> None:
    def body(channel: nr.Channel, job: nr.Job, comm: int) -> Any:
        if job.rank == 1:
            job.close()
            channel.receive()  # the process lives on
            return None
        out = job.all_reduce(comm, [1.0])
        return job.wait_event("removed", slot=1)["evidence"], out

    ranks.start(2, body, heartbeat=10.0)
    assert ranks.result(0) == ("left", [1.0])


def test_a_stopped_rank_is_silent(ranks: nr.Ranks) -> None:
    def body(_: nr.Channel, job: nr.Job, comm: int) -> Any:
        if job.rank == 2:
            job.wait_event("stale")
            return job.c.ft_job_stale(job.handle)
        event = job.wait_event("removed", slot=2)
        return event["evidence"], job.all_reduce(comm, [1.0])

    ranks.start(3, body, heartbeat=1.0)
    ranks.kill(2, signal.SIGSTOP)
    assert ranks.result(0) == ranks.result(1) == ("heartbeat", [2.0])
    ranks.kill(2, signal.SIGCONT)
    assert ranks.result(2) == 1


def test_a_forked_child_has_nothing_of_the_job(ranks: nr.Ranks) -> None:
    before = {*os.listdir("/proc/self/fd")}  # other tests' of this process

    def body(channel: nr.Channel, job: nr.Job, comm: int) -> Any:
        if job.rank == 0:
            channel.receive()
            evidence = job.wait_event("removed", slot=1)["evidence"]
            channel.send(evidence)
            return None
        request = job.post(comm, nr.BARRIER)  # threads of the library and an open operation
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            folder = "/proc/self/fd/"
            own = {*os.listdir(folder)} - before
            links = [os.readlink(folder + fd) for fd in own if os.path.lexists(folder + fd)]
            kinds = ("memfd:ftcomm", "anon_inode:[event", "pidfd", "timerfd")
            bad = [link for link in links if any(kind in link for kind in kinds)]
            with open("/proc/self/maps") as maps:
                bad += [line for line in maps if "memfd:ftcomm" in line]
            done = ctypes.c_int32()
            codes = {
                job.c.ft_job_alive(job.handle, (ctypes.c_uint8 * 2)()),
                job.c.ft_job_leave(job.handle, ctypes.c_double(1)),
                job.c.ft_comm_revoke(job.handle, ctypes.c_uint64(comm)),
                job.c.ft_request_wait(request, ctypes.c_double(1)),
                job.c.ft_request_test(request, ctypes.byref(done)),
            }
            text = job.c.ft_last_error().decode()
            job.c.ft_request_free(request)
            job.c.ft_job_close(job.handle)
            os.write(write, repr((bad, codes, "forked" in text and "init" in text)).encode())
            os.close(write)
            signal.pause()  # outlives its parent: hides nothing
        os.close(write)
        report = b""
        while part := os.read(read, 4096):
            report += part
        channel.send((child, report.decode()))
        channel.receive()
        return None

    ranks.start(2, body)
    child, report = ranks.receive(1)
    try:
        assert report == repr(([], {nr.CLOSED}, True))
        ranks.send(0, "watch")
        ranks.kill(1)
        assert ranks.receive(0) in ("robust-futex", "pidfd")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_signal_interrupts_a_wait(ranks: nr.Ranks) -> None:
    def body(channel: nr.Channel, job: nr.Job, comm: int) -> Any:
        if job.rank == 1:
            channel.receive()
            job.all_reduce(comm, [1.0])
            return None
        caught: list[int] = []
        signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
        signal.siginterrupt(signal.SIGUSR1, True)
        values = (ctypes.c_double * 1)(1.0)
        request = job.post(comm, nr.ALL_REDUCE, values)
        main = threading.get_ident()
        stop = threading.Event()

        def poke() -> None:
            while not stop.is_set():
                signal.pthread_kill(main, signal.SIGUSR1)
                stop.wait(0.001)

        poker = threading.Thread(target=poke)
        poker.start()
        with pytest.raises(nr.Error) as error:
            job.wait(request)
        stop.set()
        poker.join()
        channel.send(error.value.code)
        job.wait(request)
        return caught[:1], list(values)

    ranks.start(2, body)
    assert ranks.receive(0) == nr.INTERRUPTED
    ranks.send(1, "enter")
    assert ranks.result(0) == ([1], [2.0])


def test_waits_end_when_the_job_is_closed(ranks: nr.Ranks) -> None:
    def body(channel: nr.Channel, job: nr.Job, comm: int) -> Any:
        if job.rank == 1:
            channel.receive()
            return None
        codes: list[int] = []
        called = threading.Event()
        callback = nr.DoneFn(lambda _: called.set())
        with_callback = job.post(comm, nr.BARRIER)
        job.check(job.c.ft_request_on_done(with_callback, callback, None))
        requests = [job.post(comm, nr.BARRIER) for _ in range(3)]

        def use(request: ctypes.c_void_p) -> None:
            try:
                job.wait(request)
            except nr.Error as error:
                codes.append(error.code)

        waiting = [threading.Thread(target=use, args=(request,)) for request in requests]
        for thread in waiting:
            thread.start()
        channel.send("waiting")
        channel.receive()
        job.close()
        for thread in waiting:
            thread.join()
        return codes, called.wait(nr.DEADLINE)

    ranks.start(2, body)
    assert ranks.receive(0) == "waiting"
    ranks.send(0, "close")
    assert ranks.result(0) == ([nr.CLOSED] * 3, True)


def test_a_mad_writer_is_silence_not_a_crash(ranks: nr.Ranks) -> None:
    """Rank 1 writes an impossible length: rank 0 stops reading and goes on; the protocol settles it."""

    def body(channel: nr.Channel, job: nr.Job, comm: int) -> Any:
        if job.rank == 1:
            spec = b"rank=1,at=shm.commit,do=corrupt"
            job.check(job.c.ft_fault_configure(spec, 1, 0))
            job.post(comm, nr.BARRIER)
            channel.receive()
            return None
        line = job.wait_event("log")["text"]
        return "ring from rank 1" in line

    ranks.start(2, body)
    assert ranks.result(0)


def test_callbacks_run_once(ranks: nr.Ranks) -> None:
    def body(_: nr.Channel, job: nr.Job, comm: int) -> Any:
        calls: list[int] = []
        done = threading.Semaphore(0)

        def call(_: Any) -> None:
            calls.append(threading.get_native_id())
            done.release()

        callback = nr.DoneFn(call)
        for _turn in range(200):
            values = (ctypes.c_double * 1)(1.0)
            request = job.post(comm, nr.ALL_REDUCE, values)
            job.check(job.c.ft_request_on_done(request, callback, None))
            job.wait(request)
            assert list(values) == [2.0]
        for _turn in range(200):
            assert done.acquire(timeout=nr.DEADLINE)
        job.leave()
        job.close()
        return len(calls)

    ranks.start(2, body)
    assert ranks.result(0) == ranks.result(1) == 200


def test_a_replacement_gets_the_segment_from_a_survivor(ranks: nr.Ranks) -> None:
    size, victim = 3, 0  # the one that made the segment
    addresses: list[bytes] = []

    def body(channel: nr.Channel, job: nr.Job, comm: int) -> Any:
        if job.rank == victim:
            channel.receive()
        job.wait_event("removed", slot=victim)
        channel.send("removed")
        job.wait_event("join_waiting", slot=victim)
        request = ctypes.c_void_p()
        job.check(job.c.ft_admit(job.handle, ctypes.byref(request)))
        job.wait(request)
        out = job.all_reduce(comm, [float(job.rank)])
        job.leave()
        job.close()
        return out

    def replacement(channel: nr.Channel) -> Any:
        def exchange(blob: bytes) -> Any:
            blobs = [blob, *addresses[1:]]
            return blobs, 77

        job = nr.Job(nr.job_name(), victim, size, exchange, incarnation=1)
        request = ctypes.c_void_p()
        job.check(job.c.ft_join_wait(job.handle, ctypes.byref(request)))
        comm = job.comm(policy=nr.LOSSY)
        job.wait(request)
        out = job.all_reduce(comm, [10.0]), job.info()["links"]
        job.leave()
        job.close()
        return out

    addresses += ranks.start(size, body)
    ranks.kill(victim)
    assert [ranks.receive(rank) for rank in range(1, size)] == ["removed"] * 2
    pid, pidfd, sock = ranks.children.pop(victim)
    os.waitpid(pid, 0)
    os.close(pidfd)
    sock.close()
    ranks.spawn(victim, replacement)
    assert ranks.result(victim) == ([13.0], ["self", "shm", "shm"])
    assert ranks.result(1) == ranks.result(2) == [13.0]
