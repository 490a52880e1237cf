"""Several hosts on one machine: network namespaces joined by a bridge, gone with the processes that hold them.

Nothing is named in /run/netns and every interface lives in a namespace of ours, so a killed test leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

from harness import after_fork

from ftcomm.stores.tcp import TcpStore
from ftcomm.stores.tcp_server import TcpStoreServer

CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWNS = 0x40000000, 0x20000000, 0x00020000
SECRET = "the secret of the network tests"
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def why_not() -> str | None:
    """Why this machine can't have several hosts, or None."""
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "needs the commands ip (iproute2) and nsenter (util-linux)"
    pid = os.fork()
    if pid == 0:
        try:
            unshare(CLONE_NEWNET)
            done = subprocess.run(
                ["ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"],
                check=False,
                capture_output=True,
            )
            os._exit(done.returncode)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return None if status == 0 else "needs the right to make network namespaces and veth pairs (root)"


class _Namespace:
    """A network namespace, and the process that holds it open."""

    def __init__(self) -> None:
        self.channel, there = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._hold(there)
        there.close()
        assert self.channel.recv() == "ready"
        self.run("ip", "link", "set", "lo", "up")

    def _hold(self, channel: Connection) -> NoReturn:
        try:
            self.channel.close()
            after_fork()
            unshare(CLONE_NEWNET)
            channel.send("ready")
            with contextlib.suppress(EOFError):
                self.held(channel)
        finally:
            os._exit(0)

    def held(self, channel: Connection) -> None:
        channel.recv()

    def run(self, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", *command], check=True, capture_output=True)

    def enter(self) -> None:
        """This process, which must have one thread, goes over to this namespace."""
        fd = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        if _libc.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)

    def close(self) -> None:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class _Hub(_Namespace):
    """The switch, and the machine with the store, which a launcher's agent would host."""

    def held(self, channel: Connection) -> None:
        server = None
        while True:
            what = channel.recv()
            if what == "store":
                server = TcpStoreServer("::", 0, SECRET.encode())
                channel.send(server.address[1])
            elif server is not None:
                os._exit(0)  # the store's machine is gone; the switch stays, held by its bridge's ports


class Network:
    """``hosts`` machines with addresses 10.77.0.1, 10.77.0.2, ... (and fd77::1, ...), the store at 10.77.0.254."""

    def __init__(self, hosts: int, ipv4: bool = True) -> None:
        self.ipv4 = ipv4
        self.hub, self.switch = _Hub(), _Namespace()
        self.hosts = [_Namespace() for _ in range(hosts)]
        self.switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self.switch.run("ip", "link", "set", "bridge", "up")
        for number, host in enumerate([*self.hosts, self.hub], 1):
            name = 254 if host is self.hub else number
            self.switch.run(
                "ip", "link", "add", f"port{name}", "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)
            )
            self.switch.run("ip", "link", "set", f"port{name}", "master", "bridge", "up")
            if ipv4:
                host.run("ip", "addr", "add", f"10.77.0.{name}/24", "dev", "eth0")
            host.run("ip", "addr", "add", f"fd77::{name}/64", "dev", "eth0", "nodad")
            host.run("ip", "link", "set", "eth0", "up")
        self.hub.channel.send("store")
        self._port = self.hub.channel.recv()

    def enter(self, host: int) -> TcpStore:
        """In a rank's process, before anything else: it is on that host now. Returns the store."""
        self.hosts[host].enter()
        return TcpStore("10.77.0.254" if self.ipv4 else "fd77::254", self._port, SECRET.encode(), 30.0)

    def link(self, host: int, state: str) -> None:
        """Takes a host's cable out ("down") or puts it in again ("up")."""
        self.switch.run("ip", "link", "set", f"port{host + 1}", state)

    def kill_store(self) -> None:
        self.hub.channel.send("end")
        os.waitid(os.P_PID, self.hub.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        for namespace in [*self.hosts, self.hub, self.switch]:
            namespace.close()
