"""Runs a function as the ranks of a job, in processes forked from the test itself, and can kill any of them.

Forking from a parent that has everything imported makes a rank in milliseconds, and lets a test's function be a closure.
The parent itself never starts a job: it has no thread of ftcomm and no descriptor of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import inspect
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import ftcomm
from ftcomm import _calls, _lib
from ftcomm.stores.tcp import TcpStore
from ftcomm.stores.tcp_server import TcpStoreServer

DEADLINE = 60.0
_PR_SET_PDEATHSIG = 1
_numbers = itertools.count()


class Failed(AssertionError):
    """A rank did what the test did not expect; the text has every rank's error, exit and output."""


@dataclass
class Result:
    """What became of one process."""

    rank: int
    incarnation: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    status: int | None = None  # exit code, or minus the signal
    log: str = ""

    @property
    def ok(self) -> bool:
        return self.error is None and self.status == 0

    def text(self) -> str:
        name = f"--- rank {self.rank}" + (f".{self.incarnation}" if self.incarnation else "")
        return "\n".join(filter(None, [f"{name}: exit {self.status}", self.trace, self.log.rstrip()]))


class Context:
    """The child's side: what it may tell the test and wait for."""

    def __init__(self, rank: int, incarnation: int, channel: Connection) -> None:
        self.rank, self.incarnation, self._channel = rank, incarnation, channel
        self.lock = threading.Lock()  # a mark may come from a listener's thread

    def mark(self, name: str, value: Any = None) -> None:
        """Tells the test that this point is reached (Group.wait_for)."""
        with self.lock:
            self._channel.send(("mark", name, value))

    def hold(self) -> Any:
        """Waits for Group.release; returns its value. The job's threads go on meanwhile."""
        return self._channel.recv()

    @staticmethod
    def die() -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL returned")


@dataclass
class _Process:
    pid: int
    pidfd: int
    channel: Connection
    log: Path
    result: Result


class Group:
    """The running ranks of one job."""

    def __init__(
        self,
        store: tuple[str, int],
        folder: Path,
        size: int,
        options: ftcomm.Options,
        faults: str,
        direct: bool,
        on_a_host: int | None = None,
    ):
        self.job = f"test-{os.getpid()}-{next(_numbers)}"
        self.size, self.options = size, options
        self._store, self._folder, self._faults, self._direct = store, folder, faults, direct
        self._on_a_host = on_a_host
        self._processes: dict[tuple[int, int], _Process] = {}
        self._marks: list[tuple[int, str, Any]] = []
        self.fn: Callable[..., Any] | None = None  # what every rank runs

    # -- start, signals, marks

    def spawn(self, rank: int, fn: Callable[..., Any], incarnation: int = 0) -> None:
        """Starts one rank (or, with an incarnation, the replacement of one)."""
        here, there = Pipe()
        log = self._folder / f"{self.job}-{rank}.{incarnation}.log"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            here.close()
            for other in self._processes.values():
                other.channel.close()
                os.close(other.pidfd)
            self._child(rank, incarnation, fn, there, log)
        there.close()
        self._processes[rank, incarnation] = _Process(pid, os.pidfd_open(pid), here, log, Result(rank, incarnation))

    def pid(self, rank: int, incarnation: int = 0) -> int:
        return self._processes[rank, incarnation].pid

    def kill(self, rank: int, sig: int = signal.SIGKILL, incarnation: int = 0) -> None:
        signal.pidfd_send_signal(self._processes[rank, incarnation].pidfd, sig)

    def wake(self, rank: int) -> None:
        """Ends the stop of a failpoint (``do=stop:60``) before its time, and its helper, the rank's one child."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.pid(rank):
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        self.kill(rank, signal.SIGCONT)

    def wake_late(self, rank: int, others: set[int]) -> None:
        """A stopped rank goes on when the others, who then hold, have "filled" their buffers; they do when it has "returned"."""
        for other in others:
            self.wait_for(other, "filled")
        self.wake(rank)
        self.wait_for(rank, "returned")
        for other in others:
            self.release(other)

    def release(self, rank: int, value: Any = None, incarnation: int = 0) -> None:
        """Ends the rank's Context.hold()."""
        self._processes[rank, incarnation].channel.send(value)

    def wait_for(self, rank: int, name: str, deadline: float = DEADLINE) -> Any:
        """Blocks until the rank has marked the point; returns the mark's value."""
        until = time.monotonic() + deadline
        while True:
            for mark in self._marks:
                if mark[:2] == (rank, name):
                    self._marks.remove(mark)
                    return mark[2]
            if not any(p.result.rank == rank and p.result.status is None for p in self._processes.values()):
                self._fail(f"Rank {rank} ended before it reached {name!r}.")
            self._step(until, f"rank {rank} to reach {name!r}")

    def wait_ended(self, rank: int, incarnation: int = 0, deadline: float = DEADLINE) -> None:
        """Blocks until that process has ended, however."""
        until = time.monotonic() + deadline
        while self._processes[rank, incarnation].result.status is None:
            self._step(until, f"rank {rank} to end")

    def wait_stopped(self, rank: int) -> None:
        """Blocks until a stop of a failpoint has taken hold. Its other threads go on until then."""
        how = os.waitid(os.P_PID, self.pid(rank), os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if how is None or how.si_code != os.CLD_STOPPED:
            self._fail(f"Rank {rank} ended before it was stopped.")

    # -- end

    def results(self, deadline: float = DEADLINE) -> list[Result]:
        """Waits for all processes to end; in the order of rank and incarnation."""
        until = time.monotonic() + deadline
        while any(process.result.status is None for process in self._processes.values()):
            self._step(until, "all ranks to end")
        self._close()
        left = left_behind(self.job)
        if left:
            raise Failed(f"Left behind by {self.job}: {left}")
        return [self._processes[key].result for key in sorted(self._processes)]

    def abort(self) -> None:
        """Kills what still runs (only own children, through their pidfds) and reaps it."""
        for process in self._processes.values():
            if process.result.status is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
                _, status = os.waitpid(process.pid, 0)
                process.result.status = os.waitstatus_to_exitcode(status)
        self._close()

    def _close(self) -> None:
        for process in self._processes.values():
            if not process.channel.closed:
                process.channel.close()
                os.close(process.pidfd)
                process.result.log = process.log.read_text(errors="replace") if process.log.exists() else ""

    def _step(self, until: float, waited_for: str) -> None:
        """Takes in one batch of messages and deaths."""
        running = [p for p in self._processes.values() if p.result.status is None]
        ready = wait([p.channel for p in running] + [p.pidfd for p in running], max(0.0, until - time.monotonic()))
        if not ready:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pidfd, signal.SIGCONT)
                    signal.pidfd_send_signal(process.pidfd, signal.SIGUSR1)  # every thread's Python stack into the log
            wait([p.pidfd for p in running], 1.0)
            self._fail(f"Waited in vain for {waited_for}.")
        for process in running:
            if process.channel in ready or process.pidfd in ready:
                self._take(process)
            if process.pidfd in ready:
                _, status = os.waitpid(process.pid, 0)
                process.result.status = os.waitstatus_to_exitcode(status)

    def _take(self, process: _Process) -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while process.channel.poll():
                kind, *rest = process.channel.recv()
                if kind == "mark":
                    self._marks.append((process.result.rank, *rest))
                elif kind == "result":
                    process.result.value = rest[0]
                else:
                    process.result.error, process.result.trace = pickle.loads(rest[0]), rest[1]

    def _fail(self, why: str) -> NoReturn:
        self.abort()
        raise Failed("\n".join([why, *(process.result.text() for process in self._processes.values())]))

    # -- the child

    def _child(self, rank: int, incarnation: int, fn: Callable[..., Any], channel: Connection, log: Path) -> NoReturn:
        status = 1
        try:
            after_fork()
            _output_to(log)
            if self._faults:
                os.environ["FTCOMM_FAULTS"] = self._faults
            context = Context(rank, incarnation, channel)
            try:
                value = self._run(context, fn)
                with context.lock:
                    channel.send(("result", value))
                status = 0
            except BaseException as error:
                with context.lock:
                    channel.send(("error", _pickled(error), traceback.format_exc()))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _run(self, context: Context, fn: Callable[..., Any]) -> Any:
        arguments: list[Any] = [context] if len(inspect.signature(fn).parameters) > 1 else []
        if not self._direct:
            return fn(self, *arguments)
        comm = ftcomm.init(
            context.rank,
            self.size,
            store=self.store(),
            job=self.job,
            incarnation=context.incarnation,
            options=self.options_of(context.rank),
            timeout=30.0,
        )
        value = fn(comm, *arguments)
        comm.leave()
        return value

    def options_of(self, rank: int) -> ftcomm.Options:
        if self._on_a_host is None or self.options.host is not None:
            return self.options
        return dataclasses.replace(self.options, host=f"host-{rank // self._on_a_host}")

    def store(self) -> TcpStore:
        return TcpStore(*self._store)


class Ranks:
    """The fixture ``ranks``: ``ranks(4, fn)`` runs ``fn(comm)`` or ``fn(comm, context)`` on 4 ranks, returns their values."""

    def __init__(self, store: tuple[str, int], folder: Path) -> None:
        self._store, self._folder = store, folder
        self._groups: list[Group] = []

    def __call__(
        self, size: int, fn: Callable[..., Any], *, dies: Iterable[int] = (), deadline: float = DEADLINE, **how: Any
    ) -> list[Any]:
        group = self.start(size, fn, **how)
        return self.values(group, dies, deadline)

    def start(
        self, size: int, fn: Callable[..., Any] | None, *, faults: str = "", direct: bool = True, **options: Any
    ) -> Group:
        """Starts the ranks and returns at once. ``direct=False``: ``fn(group)`` itself starts the job, or does not."""
        # Over tcp every rank is as if alone on its host: nothing but its sockets tells of its death, and the store decides.
        on_a_host = {"tcp": 1, "hosts": 2, "hosts of 3": 3}.get(options.get("transport", ""))
        if str(options.get("transport")).startswith("hosts"):  # so many ranks on each
            options["transport"] = "auto"
        made = ftcomm.Options(**{"timeout": 30.0, **options})
        group = Group(self._store, self._folder, size, made, faults, direct, on_a_host)
        self._groups.append(group)
        group.fn = fn
        for rank in range(size if fn is not None else 0):
            group.spawn(rank, fn)
        return group

    @staticmethod
    def values(group: Group, dies: Iterable[int] = (), deadline: float = DEADLINE) -> list[Any]:
        """The values of a group that should end well, but for the ranks that die."""
        dead = set(dies)
        results = group.results(deadline)
        for result in results:
            if result.ok == (result.rank in dead and result.incarnation == 0):
                raise Failed(
                    "\n".join([f"Rank {result.rank} ended otherwise than expected.", *(r.text() for r in results)])
                )
        return [result.value for result in results]

    def close(self) -> None:
        for group in self._groups:
            group.abort()


class StoreProcess:
    """A process that hosts the store of all tests, as a launcher's agent does: it outlives every rank."""

    def __init__(self) -> None:
        self._channel, there = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._channel.close()
            after_fork()
            server = TcpStoreServer()
            there.send(server.address)
            with contextlib.suppress(EOFError):
                there.recv()
            os._exit(0)
        there.close()
        self.address: tuple[str, int] = self._channel.recv()

    def close(self) -> None:
        self._channel.close()
        os.waitpid(self._pid, 0)


def load() -> None:
    """Loads the library into the parent, so that children have it already."""
    _lib.lib()

    import ftcomm.api
    import ftcomm.init_methods
    import ftcomm.rendezvous  # noqa: F401

    _calls.gate(0)


def after_fork() -> None:
    """First thing in a child. It dies with its parent, and never collects the parent's garbage: the destructor of a torch
    TCPStore joins its thread, which is not in the child, and so hung a rank in whatever line made the collector run."""
    gc.freeze()
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _output_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.default_int_handler if sig == signal.SIGINT else signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def left_behind(job: str) -> list[str]:
    """Names of this job, not of another one that runs beside it, in /dev/shm and among the abstract sockets."""
    with open("/proc/net/unix") as table:
        left = [line.split()[-1] for line in table if f"@ftcomm-{job}-" in line]
    with contextlib.suppress(OSError):
        left += [name for name in os.listdir("/dev/shm") if f"{job}-" in name]
    return left
