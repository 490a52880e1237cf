"""Connections to ranks besides the job's own links: threads that serve other ranks while their own script waits in an operation.

Where each rank serves is in the job's store, with a key that both ends have to know.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from ftcomm.boot import boot_id
from ftcomm.job import Job

__all__ = ["CONNECTING", "Address", "Line", "Server", "call", "find"]

Address = dict[str, Any]
CONNECTING = 2.0  # seconds: to who is about to answer
PROVING = 30.0  # seconds, for whoever has connected
_open: weakref.WeakSet[Line | Server] = weakref.WeakSet()  # of this process


def _key(job: Job, name: str, rank: int) -> str:
    return f"ftcomm/{job.instance}/{name}/{rank}"


def _machine() -> str:
    return f"{boot_id()} {socket.gethostname()}"


def find(job: Job, name: str, rank: int) -> Address | None:
    """Where that rank serves, if it does."""
    found = job.store.get(_key(job, name, rank)) if job.store is not None else None
    return None if not found else json.loads(found)


class Line:
    """A connection that another thread can cut: whoever waits on it then gets EOFError."""

    def __init__(self, made: socket.socket) -> None:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.settimeout(None)
        self.socket = made
        _open.add(self)

    def prove(self, secret: bytes, first: bool) -> None:
        """Both ends know the secret. One of them asks first.

        Raises:
            AuthenticationError, AssertionError, OSError, EOFError: the other end does not, or is gone.
        """
        with Connection(self.socket.dup().detach()) as connection:
            for ask in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
                ask(connection, secret)

    def wait_at_most(self, seconds: float) -> None:
        """For the next bytes, whoever reads or writes them. Then it is BlockingIOError. 0: for ever."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, side, limit)

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()
        _open.discard(self)

    def close_in_child(self) -> None:
        self.socket.close()


def call(address: Address) -> Line:
    """A line to it, on which nothing is proved yet.

    Raises:
        OSError: nobody listens there.
    """
    host = "127.0.0.1" if address["machine"] == _machine() else address["host"]
    return Line(socket.create_connection((host, address["port"]), CONNECTING))


class Server:
    """Serves any number of ranks at once, each in a thread.

    Args:
        name: of what it serves.
        serve: called with a line to somebody who knows the key, until it returns, or OSError or EOFError says that the other end
            is gone.
    """

    def __init__(self, job: Job, name: str, serve: Callable[[Line], None]) -> None:
        self._serving, self._name = serve, name
        self._secret = os.urandom(32)
        # As the ranks' own links do: without a secret of the job, nobody from another host is let in.
        self._server = socket.create_server(("" if job.options.secret else "127.0.0.1", 0))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock, self._lines, self._closing = threading.Lock(), set[Line](), False
        self._threads: list[threading.Thread] = []
        _open.add(self)
        atexit.register(self.close)  # a loop that is never ended is ended when threads do not run any more
        self._accepting = threading.Thread(target=self._accept, name=f"ftcomm-{name}", daemon=True)
        self._accepting.start()
        if job.store is not None:
            address = {"machine": _machine(), "host": socket.gethostname(), "port": self._server.getsockname()[1]}
            address |= {"incarnation": job.incarnation, "secret": self._secret.hex()}
            job.store.set(_key(job, name, job.rank), json.dumps(address).encode())

    def close(self) -> None:
        """Cuts all lines, and waits until what is being done for them has come to an end."""
        atexit.unregister(self.close)
        with self._lock:
            if self._closing:
                return
            self._closing = True
            lines = list(self._lines)
        os.eventfd_write(self._wake, 1)  # closing it would wake nobody while a forked child has it open
        self._accepting.join()
        _open.discard(self)
        self._server.close()
        os.close(self._wake)
        for line in lines:
            line.cut()
        for thread in self._threads:
            thread.join()

    def close_in_child(self) -> None:
        """After fork: a child that outlives its parent must not keep the port."""
        self._lock, self._closing = threading.Lock(), True
        self._server.close()
        os.close(self._wake)

    def _accept(self) -> None:
        while self._wake not in wait([self._server, self._wake]):
            try:
                line = Line(self._server.accept()[0])
            except OSError:  # it has gone again, or there are too many files
                wait([self._wake], 0.1)
                continue
            with self._lock:
                if self._closing:
                    line.close()
                    return
                self._lines.add(line)
                thread = threading.Thread(target=self._serve, args=(line,), name=f"{self._name}-line", daemon=True)
                thread.start()
                self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _serve(self, line: Line) -> None:
        try:
            line.wait_at_most(PROVING)
            line.prove(self._secret, first=True)
            line.wait_at_most(0)
            self._serving(line)
        except (OSError, EOFError, AuthenticationError, AssertionError):  # the last: a stranger with other words
            pass  # who asked is through, or dead: the next one is welcome
        finally:
            with self._lock:
                self._lines.discard(line)
                line.close()


def _close_in_child() -> None:
    """Workers of a DataLoader are forked while these are open: whoever waits at the other end is to see this process's end."""
    for one in tuple(_open):
        one.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
