"""The measured ranks of recovery.py: one process of ftcomm or of Open MPI's ULFM. They report to the driver over a socket.

A rank says when it is ready, when it has noticed the failure, and when it has returned from the first all-reduce begun after
that; times are CLOCK_MONOTONIC of one machine. With them goes how long an all-reduce took before the failure. A rank has noticed
when a call of the library has said so: by an error, by an outcome with fewer contributors, or by ``failed()``, which is asked
between the all-reduces. Every value is compared, once all survivors are done: who is done first must not take the processors
from who is not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np

WARM_UP, HEALTHY = 10, 10  # all-reduces
PR_SET_PDEATHSIG = 1


def run(args: argparse.Namespace) -> None:
    """One rank, until the driver hangs up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # of mpirun, or of the driver
    driver = Client(args.report, family="AF_UNIX")
    if args.system == "ulfm":
        ulfm(driver, args)
    else:
        ftcomm_rank(driver, args)


def get_ready(driver: Connection, rank: int, args: argparse.Namespace) -> Any:
    """What only the victim holds: touched memory, then forked children that share it and sleep, as DataLoader workers do."""
    held = None
    if rank == args.victim:
        held = np.ones(args.memory_mib << 20, dtype=np.uint8)
        for _ in range(args.workers):
            if os.fork() == 0:
                while True:
                    signal.pause()
    driver.send(("ready", rank, os.getpid()))
    return held


def healthy(all_reduce: Callable[[], object]) -> float:
    """Nanoseconds of an all-reduce while nobody has failed, mean of some."""
    for _ in range(WARM_UP):
        all_reduce()
    began = time.monotonic_ns()
    for _ in range(HEALTHY):
        all_reduce()
    return (time.monotonic_ns() - began) / HEALTHY


def finish(driver: Connection, rank: int, results: list[tuple[np.ndarray, int]]) -> None:
    """Waits for the other survivors, and looks at the values then."""
    driver.send(("done", rank))
    driver.recv()
    for array, value in results:
        if not (array == value).all():
            raise AssertionError(f"rank {rank}: {np.unique(array)[:5]} instead of {value}")


def sum_of_survivors(args: argparse.Namespace) -> int:
    return sum(r + 1 for r in range(args.ranks) if r != args.victim)


def ftcomm_rank(driver: Connection, args: argparse.Namespace) -> None:
    import ftcomm

    rank, size = args.rank, args.ranks
    host = f"host-{rank * args.hosts // size}" if args.hosts > 1 else None
    options = ftcomm.Options(policy=args.system, transport=args.transport, host=host, timeout=60)
    comm = ftcomm.init(rank, size, f"file://{args.store}", options)
    seen: list[tuple[int, str]] = []  # when the library had evidence, and which
    comm.job.add_listener(lambda e: seen.append((e["monotonic_ns"], e["evidence"])) if "evidence" in e else None)
    work, data = np.zeros(args.mib << 18, np.float32), np.full(args.mib << 18, rank + 1, np.float32)
    before = healthy(lambda: comm.all_reduce(work))
    comm.barrier()
    held = get_ready(driver, rank, args)
    noticed = done = 0
    while True:
        if not noticed and comm.failed():
            noticed = time.monotonic_ns()
        knew = noticed
        try:
            outcome = comm.all_reduce(work)
        except ftcomm.PeerFailure:
            noticed = noticed or time.monotonic_ns()
            comm = comm.shrink()
            break
        if knew and not done:
            done = time.monotonic_ns()
        if len(outcome.contributors) < size:  # the same on all ranks, unlike comm.failed()
            noticed = noticed or time.monotonic_ns()
            break
    comm.all_reduce(data)
    done = done or time.monotonic_ns()
    lossy = [(work, 0)] if args.system == "lossy" else []  # an operation that failed leaves anything
    finish(driver, rank, [(data, sum_of_survivors(args)), *lossy])
    comm.leave()  # events may come late; after this all have
    driver.send(("report", rank, before, {"evidence": seen[0][0], "noticed": noticed, "done": done}, seen[0][1]))
    del held


def ulfm(driver: Connection, args: argparse.Namespace) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    rank = comm.rank
    work, data = np.zeros(args.mib << 18, np.float32), np.full(args.mib << 18, rank + 1, np.float32)
    before = healthy(lambda: comm.Allreduce(MPI.IN_PLACE, work))
    comm.Barrier()
    held = get_ready(driver, rank, args)
    while True:
        try:
            comm.Allreduce(MPI.IN_PLACE, work)
        except MPI.Exception:
            noticed = time.monotonic_ns()
            comm.Revoke()
            comm = comm.Shrink()
            break
    comm.Allreduce(MPI.IN_PLACE, data)
    done = time.monotonic_ns()
    finish(driver, rank, [(data, sum_of_survivors(args))])
    driver.send(("report", rank, before, {"noticed": noticed, "done": done}, ""))
    del held
    os._exit(0)  # MPI_Finalize after a failure may hang (ompi issue 11404)
