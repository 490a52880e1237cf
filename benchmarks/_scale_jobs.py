"""One job of scale.py: the gate, the operations, the kill, and what the last survivor reports."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from _jobs import MPIRUN_FAILED, Broken, kill_all, one_thread, start, tail, under_ulfm

PROGRAM = Path(__file__).resolve().parent / "scale.py"
CALLS = ("agree", "barrier", "all_reduce")
STEPS = ("detect", "shrink", "next")
HELD = ("pss", "shmem", "private", "threads", "fds", "tcp")  # of a rank; by the one that has most


def hosts_of(system: str, size: int, args: argparse.Namespace) -> int:
    return max(2, size // args.per_host) if system == "hosts" else 1


def measure(system: str, size: int, number: int, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of each step to its last rank, and what a rank holds; Broken if the job does not come to its end."""
    for _ in range(5):
        try:
            with _job(system, size, number, args, folder) as job:
                return job.measure()
        except Broken as error:
            if MPIRUN_FAILED not in str(error):
                raise
    raise Broken(f"{system}: mpirun did not start five times")


@contextlib.contextmanager
def _job(system: str, size: int, number: int, args: argparse.Namespace, above: Path) -> Iterator[_Job]:
    folder = Path(tempfile.mkdtemp(dir=above))
    # Open MPI leaves the segments of killed ranks behind: they get a folder of their own.
    segments = Path(tempfile.mkdtemp(prefix="ftcomm-bench-", dir="/dev/shm")) if system == "ulfm" else None
    job = _Job(system, size, (size // 2 + number) % size, args, folder)
    try:
        job.start(segments)
        yield job
    except Broken as error:
        raise Broken(f"{system}, {size} ranks: {error}\n{tail(folder / 'out', 2000)}".rstrip()) from None
    finally:
        job.close()
        for gone in filter(None, (folder, segments)):
            shutil.rmtree(gone, ignore_errors=True)


class _Job:
    def __init__(self, system: str, size: int, victim: int, args: argparse.Namespace, folder: Path) -> None:
        self.system, self.size, self.victim, self.args, self.folder = system, size, victim, args, folder
        self.listener = Listener(str(folder / "report"), family="AF_UNIX", backlog=size)
        self.ranks: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, segments: Path | None) -> None:
        own = [sys.executable, str(PROGRAM), "--system", self.system, "--report", str(self.folder / "report")]
        own += ["--store", str(self.folder / "store"), "--size", str(self.size), "--victim", str(self.victim)]
        own += ["--calls", str(self.args.calls), "--patience", str(self.args.patience)]
        own += ["--heartbeat", str(self.args.heartbeat)]
        own += ["--hosts", str(hosts_of(self.system, self.size, self.args)), "--transport", self.args.transport]
        environment = one_thread(self.folder)
        if segments is not None:
            launcher = under_ulfm(self.size, "--mca", "btl_sm_backing_directory", str(segments))
            self.processes.append(start([*launcher, *own], environment, self.folder / "out"))
            return
        for rank in range(self.size):
            self.processes.append(start([*own, "--rank", str(rank)], environment, self.folder / f"out-{rank}"))

    def measure(self) -> dict[str, float]:
        opened = self._open_gate()
        ready = self._reports("ready", set(range(self.size)), "to start and to do the operations")
        found = {"start": (max(r["started"] for r in ready.values()) - opened) / 1e9}
        found["start_cpu"] = statistics.median(r["cpu"] for r in ready.values())
        for name in CALLS:
            rounds = zip(*(r["times"][name]["times"] for r in ready.values()), strict=True)
            found[name] = statistics.median(map(max, rounds))
            found[f"{name}_cpu"] = statistics.median(r["times"][name]["cpu"] for r in ready.values())
        for name in HELD:
            found[name] = max(r["used"][name] for r in ready.values())
        if self.system != "ulfm":
            found["segment"] = max(r["used"]["segment"] for r in ready.values())
        self._tell(self.ranks.values())
        time.sleep(random.uniform(0.2, 0.4))  # somewhere in an all-reduce
        began = time.monotonic_ns()
        os.kill(self.pids[self.victim], signal.SIGKILL)
        survivors = set(range(self.size)) - {self.victim}
        reports = self._reports("report", survivors, "to recover")
        before = began
        for name in STEPS:  # each from the last rank's step before it
            after = max(r[name] for r in reports.values())
            found[name] = (after - before) / 1e9
            before = after
        found["recovery_cpu"] = statistics.median(r["cpu"] for r in reports.values())
        self._tell(self.ranks[r] for r in survivors)
        if self.system != "ulfm":
            self._check_exits()
        return found

    def _open_gate(self) -> int:
        """When it was opened, by CLOCK_MONOTONIC: all ranks are there, with their imports done."""
        accepting = self.listener._listener._socket  # type: ignore[attr-defined] # to wait on it
        deadline = time.monotonic() + self.args.patience
        while len(self.ranks) < self.size:
            if not wait([accepting], 1.0):
                self._look(deadline, f"{self.size - len(self.ranks)} ranks to come to the gate")
                continue
            connection = self.listener.accept()
            _, rank, pid = connection.recv()
            self.ranks[rank], self.pids[rank] = connection, pid
        opened = time.monotonic_ns()
        self._tell(self.ranks.values())
        return opened

    def _reports(self, kind: str, ranks: set[int], what: str) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + self.args.patience
        found: dict[int, dict[str, Any]] = {}
        while missing := ranks - found.keys():
            by_connection = {self.ranks[r]: r for r in missing}
            ready = wait(list(by_connection), 1.0)
            if not ready:
                self._look(deadline, f"{len(missing)} ranks {what} (first: {sorted(missing)[:8]})")
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    got, rank, told = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise Broken(self._ended(by_connection[connection], what)) from None
                if got != kind:
                    raise Broken(f"rank {rank} sent {got!r} instead of {kind!r}")
                found[rank] = told
            if ready and len(found) < len(ranks):
                time.sleep(0.02)  # a driver that looks at each report would be in the ranks' way
        return found

    def _tell(self, connections: Any) -> None:
        for connection in connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send("go on")

    def _look(self, deadline: float, what: str) -> None:
        """Raises Broken when a process has ended that must not have, or when it takes too long."""
        for number, process in enumerate(self.processes):
            expected = {None, -signal.SIGKILL} if number == self.victim and self.system != "ulfm" else {None}
            if process.poll() not in expected:
                raise Broken(self._ended(number, what))
        if time.monotonic() > deadline:
            raise Broken(f"not over after {self.args.patience:g} s: waited for {what}")

    def _ended(self, number: int, what: str) -> str:
        return f"rank {number} ended while the driver waited for {what}\n{tail(self.folder / f'out-{number}', 2000)}"

    def _check_exits(self) -> None:
        deadline = time.monotonic() + self.args.patience
        for rank, process in enumerate(self.processes):
            if rank == self.victim:
                continue
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Broken(f"rank {rank} hangs at its end") from None
            if code != 0:
                raise Broken(f"rank {rank} ended with {code}\n{tail(self.folder / f'out-{rank}', 2000)}")

    def close(self) -> None:
        for connection in self.ranks.values():
            connection.close()
        self.listener.close()
        kill_all(self.folder)
        for process in self.processes:
            process.wait()
