"""The measured ranks of recovery.py: one process of ftcomm or of Open MPI's ULFM. They report to the driver over a socket.

A rank says when it is ready, when it has noticed the failure, and when it has returned from the first all-reduce begun after
that; times are CLOCK_MONOTONIC of one machine. With them goes how long an all-reduce took before the failure. A rank has noticed
when a call of the library has said so: by an error, by an outcome with fewer contributors, or by ``failed()``, which is asked
between the all-reduces. Every value is compared, once all survivors are done: who is done first must not take the processors
from who is not.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Plan:
    """What the ranks of a round do; RECOVERY has it as JSON."""

    system: str  # a policy of ftcomm's, or "ulfm"
    ranks: int
    nbytes: int  # of the all-reduce
    victim: int
    memory_mib: int = 0
    workers: int = 0
    transport: str = "auto"
    hosts: int = 1
    report: str = ""  # the driver's socket
    store: str = ""

    @property
    def elements(self) -> int:
        return max(1, self.nbytes // 4)

    @property
    def before(self) -> int:
        """All-reduces that warm up, and as many whose time is taken."""
        return max(3, min(10, (64 << 20) // max(1, self.nbytes)))

    @property
    def sum_of_survivors(self) -> int:
        return sum(r + 1 for r in range(self.ranks) if r != self.victim)


def main() -> None:
    """One rank, until the driver hangs up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # of mpirun, or of the driver
    plan = Plan(**json.loads(os.environ["RECOVERY"]))
    driver = Client(plan.report, family="AF_UNIX")
    if plan.system == "ulfm":
        ulfm(driver, plan)
    else:
        ftcomm_rank(driver, plan, int(os.environ["RANK"]))


def get_ready(driver: Connection, rank: int, before: float, plan: Plan) -> Any:
    """What only the victim holds: touched memory, then forked children that share it and sleep, as DataLoader workers do."""
    held = None
    if rank == plan.victim:
        held = np.ones(plan.memory_mib << 20, dtype=np.uint8)
        for _ in range(plan.workers):
            if os.fork() == 0:
                while True:
                    signal.pause()
    driver.send(("ready", rank, os.getpid(), before))
    return held


def healthy(all_reduce: Callable[[], object], plan: Plan) -> float:
    """Nanoseconds of an all-reduce while nobody has failed, mean of some."""
    for _ in range(plan.before):
        all_reduce()
    began = time.monotonic_ns()
    for _ in range(plan.before):
        all_reduce()
    return (time.monotonic_ns() - began) / plan.before


def finish(driver: Connection, rank: int, results: list[tuple[np.ndarray, int]]) -> None:
    """Waits for the other survivors, and looks at the values then."""
    driver.send(("done", rank))
    driver.recv()
    for array, value in results:
        if not (array == value).all():
            raise AssertionError(f"rank {rank}: {np.unique(array)[:5]} instead of {value}")


def ftcomm_rank(driver: Connection, plan: Plan, rank: int) -> None:
    import ftcomm

    size = plan.ranks
    host = f"host-{rank * plan.hosts // size}" if plan.hosts > 1 else None
    options = ftcomm.Options(policy=plan.system, transport=plan.transport, host=host, timeout=60)
    comm = ftcomm.init(rank, size, f"file://{plan.store}", options)
    seen: list[tuple[int, str]] = []  # when the library had evidence, and which
    comm.job.add_listener(lambda e: seen.append((e["monotonic_ns"], e["evidence"])) if "evidence" in e else None)
    work, data = np.zeros(plan.elements, np.float32), np.full(plan.elements, rank + 1, np.float32)
    before = healthy(lambda: comm.all_reduce(work), plan)
    comm.barrier()
    held = get_ready(driver, rank, before, plan)
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
    lossy = [(work, 0)] if plan.system == "lossy" else []  # an operation that failed leaves anything
    finish(driver, rank, [(data, plan.sum_of_survivors), *lossy])
    comm.leave()  # events may come late; after this all have
    driver.send(("report", rank, {"evidence": seen[0][0], "noticed": noticed, "done": done}, seen[0][1]))
    del held


def ulfm(driver: Connection, plan: Plan) -> None:
    from mpi4py import MPI

    comm: MPI.Comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    rank = comm.rank
    work, data = np.zeros(plan.elements, np.float32), np.full(plan.elements, rank + 1, np.float32)
    before = healthy(lambda: comm.Allreduce(MPI.IN_PLACE, work), plan)
    comm.Barrier()
    held = get_ready(driver, rank, before, plan)
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
    finish(driver, rank, [(data, plan.sum_of_survivors)])
    driver.send(("report", rank, {"noticed": noticed, "done": done}, ""))
    del held
    os._exit(0)  # MPI_Finalize after a failure may hang (ompi issue 11404)


if __name__ == "__main__":
    main()
