"""ftrun's standbys: processes that have done the script's imports, one of which becomes a worker that is started again."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ftcomm.errors import ConfigError
from ftcomm.launch.parent import die_with_launcher
from ftcomm.launch.standby import leave_idle
from ftcomm.launch.worker import AGAIN, describe_exit, describe_state

MAX_DEATHS = 2
# Of one worker, not of all of a node, also where a node has only one.
_OF_A_RANK = {"RANK", "LOCAL_RANK", "ROLE_RANK", "FTCOMM_INCARNATION", "TORCHELASTIC_ERROR_FILE"}
_OF_A_RANK |= {"FTCOMM_GENERATION", "FTCOMM_FINISHED"}  # under replay they change


def check_standbys(args: argparse.Namespace) -> int:
    """How many ftrun's arguments ask for; ConfigError for what is no such number, or can't be with the other arguments."""
    name, text = "--standby", args.standby
    if text is None:
        name, text = "FTCOMM_STANDBY", os.environ.get("FTCOMM_STANDBY") or "0"
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not valid: give a number of processes for each node, 0 (none) or more")
    if int(text) == 0:
        return 0
    if args.no_python:
        raise ConfigError(f"{name} is for Python scripts: a standby is an interpreter, and --no-python starts none")
    if args.numa_binding:
        raise ConfigError(f"{name} can't be with --numa-binding: a standby does not know yet where it has to be bound")
    if args.virtual_local_rank:
        raise ConfigError(
            f"{name} can't be with --virtual-local-rank: a standby does not know yet which GPU it may see"
        )
    if not args.module and (os.path.isdir(args.training_script) or zipfile.is_zipfile(args.training_script)):
        raise ConfigError(f"{name} is for a script file or -m MODULE, not for a folder or an archive")
    return int(text)


def common_environment(environments: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], set[str]]:
    """What a worker's environment has whoever it is, and the names of the rest, which comes when a standby becomes one."""
    particular = _OF_A_RANK | {
        name for one in environments for name, value in one.items() if any(e.get(name) != value for e in environments)
    }
    whole = {**os.environ, **environments[0]}
    return {name: value for name, value in whole.items() if name not in particular}, particular


def may_return_from_idle() -> bool:
    """Tried in a thread: without CAP_SYS_NICE or RLIMIT_NICE there is no way back from SCHED_IDLE."""
    allowed: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
                allowed.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(allowed)


class Standby:
    """One process that is not a worker yet."""

    def __init__(
        self, command: Sequence[str], target: Sequence[str], env: Mapping[str, str], particular: set[str], idle: bool
    ) -> None:
        kind = "module" if command[-1] == "-m" else "script"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.ready = False
        self._control = ours
        self._control.setblocking(False)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - what it prints is of interest only if it dies
        self._pidfd = -1
        file = str(Path(__file__).with_name("standby.py"))
        python = [part for part in command if part != "-m"]
        try:
            self.proc = subprocess.Popen(
                [*python, file, str(theirs.fileno()), kind, ",".join(sorted(particular)), *target],
                env=dict(env),
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                preexec_fn=die_with_launcher(),  # noqa: PLW1509 - two system calls, no lock
            )
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
        if idle:  # not between fork and exec, for which ftrun waits
            with contextlib.suppress(OSError):
                os.sched_setscheduler(self.proc.pid, os.SCHED_IDLE, os.sched_param(0))
        try:
            self._pidfd = os.pidfd_open(self.proc.pid)
        except OSError:
            self.sweep()
            raise

    @property
    def fds(self) -> tuple[int, int]:
        """One of them is readable when there is something to :meth:`hear`."""
        return self._control.fileno(), self._pidfd

    def lives(self) -> bool:
        """Not by the other end of the socket, which a child of an import may hold open."""
        return os.waitid(os.P_PID, self.proc.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def hear(self) -> bool:
        """Reads its sign of being ready; False if it is gone."""
        if not self.lives():
            return False
        try:
            word = self._control.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.ready = self.ready or bool(word)
        return bool(word)

    def become(self, args: Sequence[str], skip: int, env: Mapping[str, str], out: int, err: int) -> None:
        """It runs the script from now on. ``args``: the whole command, ``skip``: how much of it is the interpreter's.
        ``env``: what the standby does not have yet."""
        order = {"command": args, "argv": args[skip:], "environment": dict(env), "folder": os.getcwd()}
        # In a file, as the socket takes only so much at once and ftrun must not wait.
        with open(os.memfd_create("ftrun-order"), "wb") as file:
            file.write(json.dumps(order).encode())
            file.flush()
            file.seek(0)
            leave_idle(self.proc.pid)  # it has done so itself, unless ftrun was late to set it
            os.killpg(self.proc.pid, signal.SIGCONT)  # somebody may have stopped it
            socket.send_fds(self._control, [b"g"], [file.fileno(), out, err])

    def sweep(self) -> str:
        """Kills it, where it is not dead; how it ended and the last line that it said."""
        leave_idle(self.proc.pid)  # ftrun waits for its end
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, signal.SIGKILL)  # not reaped yet: the number is still its own
        try:
            how = describe_exit(self.proc.wait(AGAIN))
        except subprocess.TimeoutExpired:  # ftrun must not wait for a process that sleeps in the kernel
            how = f"does not die: {describe_state(self.proc.pid)}"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        self.close()
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}: {said}" if said else how

    def close(self) -> None:
        self._control.close()
        self._said.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)


class Standbys:
    """``fd`` is readable when :meth:`tend` has something to do."""

    def __init__(
        self, count: int, command: Sequence[str], target: Sequence[str], env: Mapping[str, str], particular: set[str]
    ) -> None:
        self._wanted = count
        self._command, self._target, self._env, self._particular = tuple(command), tuple(target), env, particular
        self._idle = count > 0 and may_return_from_idle()
        self._all: list[Standby] = []
        self._deaths = 0  # by themselves, since one was last used
        self._epoll = select.epoll()

    @property
    def fd(self) -> int:
        return self._epoll.fileno()

    def tend(self, log: Callable[..., object], last: bool) -> None:
        """Tells who has become ready or has died, and starts those that are missing. ``last``: nobody will be needed."""
        if last:
            self.end()
        self._look(log)
        while len(self._all) < self._wanted:
            try:
                standby = Standby(self._command, self._target, self._env, self._particular, self._idle)
            except (OSError, subprocess.SubprocessError) as error:  # no more processes, no such interpreter
                self._wanted = 0
                log("standbys-over", how=str(error))
                return
            self._all.append(standby)
            for fd in standby.fds:
                self._epoll.register(fd, select.EPOLLIN)

    def _look(self, log: Callable[..., object]) -> None:
        signs = {fd for fd, _ in self._epoll.poll(0)}
        for standby in [one for one in self._all if signs & {*one.fds}]:
            was_ready = standby.ready
            if standby.hear():
                if standby.ready and not was_ready:
                    log("standby-ready", pid=standby.proc.pid)
                continue
            how = self._drop(standby)
            self._deaths += 1
            if self._deaths == MAX_DEATHS:
                self._wanted = 0
                log("standbys-over", pid=standby.proc.pid, how=how)

    def take(self, args: Sequence[str], env: Mapping[str, str], out: int, err: int) -> subprocess.Popen[bytes] | None:
        """Makes a worker of one that is ready; None if there is none, and the worker has to be started afresh."""
        if tuple(args[: len(self._command)]) != self._command:
            return None
        different = {name for name in env.keys() | self._env.keys() if env.get(name) != self._env.get(name)}
        if different - self._particular:
            return None
        standby = next((one for one in self._all if one.ready and one.lives()), None)
        if standby is None:
            return None
        try:
            standby.become(args, len(self._command), {n: env[n] for n in self._particular & env.keys()}, out, err)
        except OSError:  # its fault or ours (no folder, no descriptors): _look finds out
            return None
        self._forget(standby)
        standby.close()
        self._deaths = 0
        return standby.proc

    def end(self) -> None:
        """Ends them all; there will be no more."""
        self._wanted = 0
        for standby in list(self._all):
            self._drop(standby)

    def _drop(self, standby: Standby) -> str:
        self._forget(standby)
        return standby.sweep()

    def _forget(self, standby: Standby) -> None:
        for fd in standby.fds:
            self._epoll.unregister(fd)
        self._all.remove(standby)
