"""One failure of recovery.py: starts the ranks of a system, kills or stops one of them, and collects the survivors' reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from _jobs import MPIRUN_FAILED, Broken, kill_all, one_thread, start, tail, under_ulfm
from _recovery_ranks import Plan

STARTING = 60.0  # seconds in which all ranks are ready
PATIENCE = 30.0  # seconds for what should take less than one
STOP_CAP = 10.0  # seconds after which a stopped rank counts as not noticed


def measure(plan: Plan, stop: bool, within: Path) -> dict[str, Any] | None:
    """Milliseconds to the last survivor's evidence, notice and next result; None: a stopped rank was not noticed in STOP_CAP.

    ``plan`` lacks the paths, which are the round's own. Broken: a rank has ended or hangs, or has a wrong value; with its output.
    """
    for _ in range(5):
        one = Round(plan, stop, within)
        try:
            one.start()
            return one.measure()
        except (Broken, TimeoutError) as error:
            text = "\n".join([f"{plan.system}, victim {plan.victim}: {error}", *one.outputs()])
            if MPIRUN_FAILED not in text:
                raise Broken(text) from None
        finally:
            one.clear()
    raise Broken(f"{plan.system}, victim {plan.victim}: mpirun did not start five times")


class Round:
    """One failure of one system, in processes of its own."""

    def __init__(self, plan: Plan, stop: bool, within: Path) -> None:
        self.stop = stop
        self.survivors = {r for r in range(plan.ranks) if r != plan.victim}
        self.folder = Path(tempfile.mkdtemp(prefix="recovery-", dir=within))
        # Open MPI leaves the segments of killed ranks behind: they get a folder of their own.
        self.segments = Path("/dev/shm", f"{within.name}-{self.folder.name}")
        self.plan = dataclasses.replace(plan, report=str(self.folder / "report"), store=str(self.folder / "store"))
        self.listener = Listener(self.plan.report, family="AF_UNIX")
        self.connections: list[Connection] = []
        self.accepting = self.listener._listener._socket  # type: ignore[attr-defined] # to wait on it
        self.processes: list[subprocess.Popen[bytes]] = []
        self.running: dict[int, int] = {}  # pidfd -> number in processes
        self.pids: dict[int, int] = {}
        self.healthy = 0.0  # seconds of an all-reduce before the failure, of the slowest rank

    def start(self) -> None:
        self.segments.mkdir()
        own = [sys.executable, str(Path(__file__).with_name("_recovery_ranks.py"))]
        # One thread for NumPy, as torchrun and ftrun set it: what the kernel takes apart is the rank and not its pool.
        environment = one_thread(self.folder) | {"RECOVERY": json.dumps(dataclasses.asdict(self.plan))}
        if self.plan.system == "ulfm":
            launcher = under_ulfm(self.plan.ranks, "--mca", "btl_sm_backing_directory", str(self.segments))
            commands = [[*launcher, *own]]
        else:
            commands = [own] * self.plan.ranks
        for number, command in enumerate(commands):
            out = self.folder / f"output-{number}"
            self.processes.append(start(command, environment | {"RANK": str(number)}, out))
            self.running[os.pidfd_open(self.processes[-1].pid)] = number

    def outputs(self) -> list[str]:
        return [
            text for number in range(len(self.processes)) if (text := tail(self.folder / f"output-{number}").strip())
        ]

    def clear(self) -> None:
        for connection in self.connections:
            connection.close()
        for fd in self.running:
            os.close(fd)
        self.listener.close()
        kill_all(self.folder)
        for process in self.processes:
            process.wait()
        for folder in (self.folder, self.segments):
            shutil.rmtree(folder, ignore_errors=True)

    def measure(self) -> dict[str, Any] | None:
        plan = self.plan
        while len(self.pids) < plan.ranks:
            _, rank, pid, healthy = self.message("to get ready", STARTING)
            self.pids[rank] = pid
            self.healthy = max(self.healthy, healthy / 1e9)
        time.sleep(random.uniform(0.02, 0.06 + 2 * self.healthy))  # somewhere in an all-reduce
        end = select.poll()
        victim = os.pidfd_open(self.pids[plan.victim])
        end.register(victim, select.POLLIN)
        began = time.monotonic_ns()
        os.kill(self.pids[plan.victim], signal.SIGSTOP if self.stop else signal.SIGKILL)
        ended = time.monotonic_ns() if end.poll(0 if self.stop else PATIENCE * 1e3) else 0
        os.close(victim)
        # The processors are theirs: a driver that looks at each report would be in their way.
        time.sleep(0.05 + 3 * self.healthy)
        reports = self.reports()
        if reports is None:
            return None
        self.check_exits()
        times, kinds = zip(*reports.values(), strict=True)
        last = {name: (max(t[name] for t in times) - began) / 1e6 for name in times[0]}
        if ended:
            last["ended"] = (ended - began) / 1e6
        return last | {"healthy": 1e3 * self.healthy, "kinds": dict(Counter(filter(None, kinds)))}

    def reports(self) -> dict[int, tuple[dict[str, int], str]] | None:
        """Each survivor's; None where a stopped rank was not noticed in time."""
        done: set[int] = set()
        found: dict[int, tuple[dict[str, int], str]] = {}
        while self.survivors - set(found):
            try:
                kind, rank, *report = self.message("to recover", STOP_CAP if self.stop else PATIENCE)
            except TimeoutError:
                if not self.stop:
                    raise
                return None
            if kind == "done":
                done.add(rank)
                if done == self.survivors:
                    self.go_on()
            else:
                found[rank] = (report[0], report[1])
        return found

    def go_on(self) -> None:
        """All survivors are done: they may look at their values now."""
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the victim's
                connection.send("go on")

    def message(self, what: str, patience: float) -> Any:
        """The next report. Broken when a process ends that must not, TimeoutError when nothing comes for long."""
        deadline = time.monotonic() + patience
        while True:
            sources = [self.accepting, *self.connections, *self.running]
            ready = wait(sources, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"waited {patience:g} s for ranks {what}")
            for one in ready:
                if one is self.accepting:
                    self.connections.append(self.listener.accept())
                elif isinstance(one, Connection):
                    with contextlib.suppress(EOFError, ConnectionResetError):
                        return one.recv()
                    self.connections.remove(one)
            for fd in [fd for fd in ready if fd in self.running]:  # after the reports of those that end well
                self.ended(self.running.pop(fd), what)
                os.close(fd)

    def ended(self, number: int, what: str) -> None:
        code = self.processes[number].wait()
        killed = (
            self.plan.system != "ulfm"
            and number == self.plan.victim
            and code == -signal.SIGKILL
            and len(self.pids) == self.plan.ranks
        )
        if code != 0 and not killed:
            raise Broken(f"process {number} ended with {code} while the driver waited for ranks {what}")

    def check_exits(self) -> None:
        """Survivors end with 0. mpirun itself reports the kill, and is not waited for."""
        if self.plan.system == "ulfm":
            return
        for rank, process in enumerate(self.processes):
            if rank == self.plan.victim:
                continue
            try:
                code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise Broken(f"rank {rank} hangs at its end") from None
            if code != 0:
                raise Broken(f"rank {rank} ended with {code}")
