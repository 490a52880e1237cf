"""Runs ftrun on small scripts. Scripts and tests wait for each other through pipes and process ends, never by time."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from launch import forked
from ports import free_port

PATIENCE = 120.0  # only a hang takes that long
STORE = [sys.executable, "-m", "ftcomm.cli", "store", "--port"]


def clean_environment(**more: str) -> dict[str, str]:
    """Of this process, without what ftcomm and torch's launcher would take for settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FTCOMM_", "PET_"))}
    return {**env, "OMP_NUM_THREADS": "1", **more}


class Ftrun:
    """A running ftrun with its workers' output."""

    def __init__(
        self,
        args: list[str],
        env: dict[str, str],
        stderr: IO[str] | int = subprocess.PIPE,
        cwd: str | os.PathLike[str] | None = None,
        workers: bool = False,
    ) -> None:
        """``workers``: they are forked, too."""
        self.process = forked.popen(
            args, env, workers=workers, stdout=subprocess.PIPE, stderr=stderr, cwd=cwd, start_new_session=True
        )

    def read_lines(self, count: int) -> list[str]:
        """The next lines that workers print; they stand for 'so far has it come'."""
        assert self.process.stdout is not None
        lines = [self._line(self.process.stdout.fileno()) for _ in range(count)]
        assert all(lines), f"ftrun ended early: {lines}, {self.process.communicate()[1]}"
        return lines

    @staticmethod
    def _line(fd: int) -> str:
        """Not by readline(): what a buffer has read ahead would be lost to communicate()."""
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(fd, 1)):
            line += byte
        return line.decode().strip()

    def hear(self, words: str) -> list[str]:
        """What ftrun says next, up to the first line with these words."""
        assert self.process.stderr is not None
        said: list[str] = []
        for line in self.process.stderr:
            said.append(line)
            if words in line:
                return said
        raise AssertionError(f"{words!r} was not said: {said}")

    def send(self, sig: signal.Signals) -> None:
        self.process.send_signal(sig)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, the rest of the workers' output, what ftrun said."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


Start = Callable[..., Ftrun]


def dynamic(port: int, *more: str, run: str, each: int, conf: str) -> tuple[str, ...]:
    """The flags of one of two nodes that meet in torch's dynamic rendezvous."""
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", run)
    return ("--nnodes", "2", "--nproc-per-node", str(each), *place, "--rdzv-conf", conf, *more)


class Kept:
    """A running ``ftcomm store``."""

    def __init__(self) -> None:
        self.process = forked.popen(
            ["store", "--port", "0"], dict(os.environ), launcher="ftcomm.cli", stderr=subprocess.PIPE
        )
        found = re.search(r"HOST:(\d+)", self.next_line())
        assert found
        self.port = int(found[1])

    def next_line(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def flags(self, *more: str, run: str = "run", each: int = 1, conf: str = "") -> tuple[str, ...]:
        return dynamic(self.port, *more, run=run, each=each, conf=f"is_host=0{conf}")

    def listening(self) -> int:
        """At how many ports."""
        inodes = {os.readlink(f"/proc/{self.process.pid}/fd/{n}") for n in os.listdir(f"/proc/{self.process.pid}/fd")}
        lines = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
        ]
        return len({fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes})


def start_nodes(
    start: Start,
    script: str,
    nodes: int,
    each: int,
    *flags: str,
    own: Callable[[int], tuple[str, ...]] = lambda node: (),
    **extra_env: str,
) -> list[Ftrun]:
    """Nodes of so many workers; the first has the store. ``own``: a node's own flags."""
    place = ("--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    common = ("--nnodes", str(nodes), "--nproc-per-node", str(each), *place, *flags)
    return [start(script, *common, "--node-rank", str(n), *own(n), **extra_env) for n in range(nodes)]


def start_two(start: Start, script: str, *flags: str) -> list[Ftrun]:
    """Nodes of a worker each. Each pretends to be a host: the log of one would be the other's."""
    return start_nodes(start, script, 2, 1, *flags, own=lambda node: ("--host", f"host{node}"))


def wait_gone(pidfds: list[int]) -> None:
    """Waits until the processes have ended."""
    for fd in pidfds:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(PATIENCE * 1000), "a process that should have ended still runs"
        os.close(fd)
