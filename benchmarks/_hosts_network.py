"""Two hosts on one machine for benchmarks between hosts: network namespaces with a line between them that can be narrow and long.

Nothing has a name in /run/netns and every device lives in a namespace of ours: they go with the processes in it. One of them
holds it open until its standard input ends, and kills all others then, so also when the benchmark itself was killed. A host's
name is its address, which needs no name service.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _hosts_shape import Shape

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "eth0"
# tbf lets that much through at once. Less than a large segment (64 KiB and its headers) would be cut up, at the processors' cost.
BURST = 96 << 10
QUEUE = 0.05  # seconds that a packet may wait for its turn before it is dropped
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
RELAY = Path(__file__).with_name("_hosts_relay.py")


class Impossible(RuntimeError):
    """This machine cannot do it; the text says what is missing, and how to get it."""


class Host:
    """A network namespace and a host name, and the process that holds them open."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._holder = subprocess.Popen(
            [sys.executable, __file__, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise Impossible("no right to make a network namespace")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def command(self, *command: str) -> list[str]:
        """That command on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", *command]

    def run(self, *command: str) -> None:
        done = subprocess.run(self.command(*command), check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise Impossible(f"{' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait()


@dataclass
class Line:
    """The hosts, joined."""

    hosts: tuple[Host, Host]
    shape: Shape
    delayed_by: str  # netem, relay, or nothing

    def __str__(self) -> str:
        ways = [way for way, used in (("tbf", self.shape.rate), (self.delayed_by, self.shape.delay)) if used]
        return f"{self.shape}" + (f" (by {' and '.join(ways)})" if ways else "")


@contextlib.contextmanager
def line(shape: Shape, delay_by: str = "auto") -> Iterator[Line]:
    """Two hosts and what is between them, for as long as it is needed."""
    with contextlib.ExitStack() as stack:
        hosts: list[Host] = []
        for address in ADDRESSES:
            hosts.append(Host(address))
            stack.callback(hosts[-1].close)
        first, second = hosts
        by = _how_to_delay(first, delay_by) if shape.delay else ""
        if by == "relay":
            stack.callback(_end, _relay(first, second, shape.delay))
        else:
            first.run(*_ip(f"link add {DEVICE} type veth peer name {DEVICE} netns {second.pid}"))
        for host in hosts:
            host.run(*_ip(f"addr add {host.address}/24 dev {DEVICE}"))
            host.run(*_ip(f"link set {DEVICE} txqueuelen 10000 up"))
            _shape(host, shape, by == "netem")
        yield Line((first, second), shape, by)


def why_not() -> str | None:
    """Why this machine can't have two hosts, or None."""
    missing = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: install iproute2 and util-linux"
    try:
        with line(Shape(0, 0)):
            return None
    except Impossible as error:
        return f"{error}; it needs root, or a kernel that lets users make namespaces of their own"


def own_namespace(argv: Sequence[str]) -> None:
    """Starts this program again as root of a user namespace if it has no rights and the kernel allows that."""
    if os.geteuid() == 0 or shutil.which("unshare") is None:
        return
    become = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*become, "true"], check=False, capture_output=True).returncode == 0:
        os.execvp(become[0], [*become, sys.executable, *argv])


def _ip(command: str) -> list[str]:
    return ["ip", *command.split()]


def _tc(command: str) -> list[str]:
    if shutil.which("tc") is None:
        raise Impossible("no tc: install iproute2")
    return ["tc", "qdisc", *command.split()]


def _how_to_delay(host: Host, wanted: str) -> str:
    if wanted != "relay":
        try:
            host.run(*_tc("add dev lo root netem delay 1ms"))
            host.run(*_tc("del dev lo root"))
        except Impossible:
            if wanted == "netem":
                raise
        else:
            return "netem"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise Impossible(
            "the kernel has neither netem (modprobe sch_netem) nor /dev/net/tun (modprobe tun) for a delay"
        )
    return "relay"


def _relay(first: Host, second: Host, delay: float) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        first.command(sys.executable, str(RELAY), str(delay)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise Impossible("the relay cannot make TUN devices")
        first.run(*_ip(f"link set line0 name {DEVICE}"))
        first.run(*_ip(f"link set line1 netns {second.pid} name {DEVICE}"))
    except BaseException:
        _end(process)
        raise
    return process


def _shape(host: Host, shape: Shape, netem: bool) -> None:
    at = "root"
    if netem:
        host.run(*_tc(f"add dev {DEVICE} root handle 1: netem delay {1e6 * shape.delay:.0f}us limit 1000000"))
        at = "parent 1: handle 2:"
    if shape.rate:
        limit = BURST + round(shape.rate / 8 * (QUEUE + (shape.delay if netem else 0)))
        host.run(*_tc(f"add dev {DEVICE} {at} tbf rate {shape.rate:.0f}bit burst {BURST} limit {limit}"))


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.kill()
    process.wait()


def _hold(address: str) -> None:
    outside = _namespace("self")
    if ctypes.CDLL(None).unshare(CLONE_NEWNET | CLONE_NEWUTS) != 0 or _namespace("self") == outside:
        sys.exit(1)  # on no account kill what is in the one that we came from
    socket.sethostname(address)
    subprocess.run(_ip("link set lo up"), check=True)
    print("ready", flush=True)
    sys.stdin.read()
    while others := _here():  # again: one may have started another meanwhile
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _here() -> list[int]:
    """The other processes of this namespace, all started for this benchmark."""
    mine, found = _namespace("self"), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if _namespace(process.name) == mine and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def _namespace(process: str) -> str:
    return os.readlink(f"/proc/{process}/ns/net")


if __name__ == "__main__":
    _hold(sys.argv[1])
