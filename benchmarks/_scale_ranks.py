"""The measured ranks of scale.py: one process of ftcomm, or of Open MPI's ULFM. They report to the driver over a socket.

A rank has imported everything when it comes to the gate; what follows it is measured by each rank's own CLOCK_MONOTONIC, which is
one clock on one machine. Every call's value is compared; calls are too short for the comparison to be in anybody's way.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np

PR_SET_PDEATHSIG = 1
WARM_UP = 3  # calls
ELEMENTS = 2  # float64: 16 bytes


def run(args: argparse.Namespace) -> None:
    """One rank, until the driver hangs up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # of mpirun, or of the driver
    if args.system == "ulfm":
        ulfm(args)
    else:
        ftcomm_rank(args)


def at_the_gate(args: argparse.Namespace, rank: int) -> Connection:
    driver = Client(args.report, family="AF_UNIX")
    driver.send(("gate", rank, os.getpid()))
    driver.recv()
    return driver


def ftcomm_rank(args: argparse.Namespace) -> None:
    import ftcomm
    from ftcomm import init_methods, rendezvous  # what init() imports

    del init_methods, rendezvous
    rank, size, victim = args.rank, args.size, args.victim
    host = f"host-{rank * args.hosts // size}" if args.hosts > 1 else None
    options = ftcomm.Options(transport=args.transport, host=host, heartbeat=args.heartbeat, timeout=args.patience)
    driver = at_the_gate(args, rank)
    spent = cpu()
    comm = ftcomm.init(rank, size, f"file://{args.store}", options)
    comm.barrier()
    started = time.monotonic_ns()
    spent = cpu() - spent
    data = np.zeros(ELEMENTS)

    def add(on: Any, expected: float) -> None:
        data[:] = rank + 1
        on.all_reduce(data)
        same(rank, "all_reduce", float(data[0]), expected)

    whole = size * (size + 1) / 2
    calls: dict[str, Callable[[], None]] = {
        "agree": lambda: same(rank, "agree", comm.agree(~(1 << (rank % 62))), flags(size)),
        "barrier": lambda: _ignore(comm.barrier()),
        "all_reduce": lambda: add(comm, whole),
    }
    times = measured(calls, args.calls, comm.barrier)
    info = comm.stats()
    links: list[str] = info["links"]
    used = {
        **process_state(),
        "segment": float(info.get("shared_memory", {}).get("used", 0)),
        "epoch": float(info["epoch"]),
        "links": float(sum(link == "tcp" for link in links)),
    }
    driver.send(("ready", rank, {"started": started, "cpu": spent, "times": times, "used": used}))
    driver.recv()
    comm.barrier()
    while True:
        try:
            comm.all_reduce(data)
        except ftcomm.PeerFailure as error:
            noticed = time.monotonic_ns()
            dead = error.ranks
            break
    before = cpu()
    smaller = comm.shrink()
    shrunk = time.monotonic_ns()
    add(smaller, whole - victim - 1)
    done = time.monotonic_ns()
    same(rank, "dead ranks", tuple(dead), (victim,))
    same(rank, "size after shrink", smaller.size, size - 1)
    driver.send(
        ("report", rank, {"detect": noticed, "shrink": shrunk, "next": done, "cpu": cpu() - before, "kind": ""})
    )
    driver.recv()
    comm.leave(timeout=args.patience)


def ulfm(args: argparse.Namespace) -> None:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    rank, size, victim = int(os.environ["OMPI_COMM_WORLD_RANK"]), args.size, args.victim
    driver = at_the_gate(args, rank)
    spent = cpu()
    MPI.Init()
    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    comm.Barrier()
    started = time.monotonic_ns()
    spent = cpu() - spent
    data = np.zeros(ELEMENTS)

    def agree() -> None:
        same(rank, "agree", comm.Agree(0x7FFFFFFF & ~(1 << (rank % 31))), 0x7FFFFFFF & narrow(flags(size, 31)))

    def add(on: Any, expected: float) -> None:
        data[:] = rank + 1
        on.Allreduce(MPI.IN_PLACE, data)
        same(rank, "Allreduce", float(data[0]), expected)

    whole = size * (size + 1) / 2
    calls: dict[str, Callable[[], None]] = {
        "agree": agree,
        "barrier": comm.Barrier,
        "all_reduce": lambda: add(comm, whole),
    }
    times = measured(calls, args.calls, comm.Barrier)
    driver.send(("ready", rank, {"started": started, "cpu": spent, "times": times, "used": process_state()}))
    driver.recv()
    comm.Barrier()
    while True:
        try:
            comm.Allreduce(MPI.IN_PLACE, data)
        except MPI.Exception:
            noticed = time.monotonic_ns()
            break
    before = cpu()
    comm.Revoke()
    smaller = comm.Shrink()
    smaller.Set_errhandler(MPI.ERRORS_RETURN)
    shrunk = time.monotonic_ns()
    add(smaller, whole - victim - 1)
    done = time.monotonic_ns()
    same(rank, "size after Shrink", smaller.size, size - 1)
    driver.send(
        ("report", rank, {"detect": noticed, "shrink": shrunk, "next": done, "cpu": cpu() - before, "kind": ""})
    )
    with contextlib.suppress(EOFError):
        driver.recv()
    os._exit(0)  # MPI_Finalize after a failure may hang (ompi issue 11404)


def measured(calls: dict[str, Callable[[], None]], rounds: int, meet: Callable[[], Any]) -> dict[str, Any]:
    """By call: seconds of each round on this rank, begun right after a barrier, and processor seconds of a round."""
    found: dict[str, Any] = {}
    for name, call in calls.items():
        times = []
        for number in range(WARM_UP + rounds):
            if number == WARM_UP:
                spent = cpu()
            meet()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        found[name] = {"times": times[WARM_UP:], "cpu": (cpu() - spent) / rounds}
    return found


def flags(size: int, bits: int = 62) -> int:
    """The AND of what all ranks give to agree."""
    value = -1
    for rank in range(size):
        value &= ~(1 << (rank % bits))
    return value


def narrow(value: int) -> int:
    return value & 0x7FFFFFFF


def same(rank: int, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise AssertionError(f"rank {rank}: {what} gave {got}, expected {expected}")


def _ignore(_: object) -> None:
    pass


def cpu() -> float:
    """Processor seconds of this process so far, in user mode and in the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def process_state() -> dict[str, float]:
    """What this process holds: proportional and private bytes, threads, file descriptors, established TCP connections."""
    kib = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, _, value = line.partition(":")
        kib[name] = int(value.split()[0])
    sockets, number = set(), 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            to = os.readlink(fd)
            number += 1
            if to.startswith("socket:["):
                sockets.add(to[8:-1])
    connections = 0
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                column = line.split()
                connections += column[3] == "01" and column[9] in sockets
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if ":" in line
    )
    return {
        "pss": kib["Pss"] * 1024.0,
        "shmem": kib.get("Pss_Shmem", 0) * 1024.0,
        "private": (kib["Private_Clean"] + kib["Private_Dirty"]) * 1024.0,
        "threads": float(status["Threads"]),
        "fds": float(number),
        "tcp": float(connections),
    }
