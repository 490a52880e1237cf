"""A survivor's side: a thread that computes micro-batches for replacements of other stages while its own stage waits."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from ftcomm.job import Job
from ftcomm.recovery.engine.parallel.message import Packed, receive, send, unpack
from ftcomm.recovery.engine.parallel.work import compute, differing, settings

__all__ = ["Address", "Line", "Service", "find", "machine"]

Address = dict[str, Any]
_open: weakref.WeakSet[Line | Service] = weakref.WeakSet()  # of this process


def _key(job: Job, rank: int) -> str:
    return f"ftcomm/{job.instance}/parallel-replay/{rank}"


def machine() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {socket.gethostname()}"


def find(job: Job, rank: int) -> Address | None:
    """Where that rank serves, if it does."""
    found = job.store.get(_key(job, rank)) if job.store is not None else None
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

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()
        _open.discard(self)

    def close_in_child(self) -> None:
        self.socket.close()


class Service:
    """Serves any number of replacements at once, each in a thread.

    Args:
        replaying: this process does steps again itself, and has no time.
    """

    def __init__(self, job: Job, replaying: Callable[[], bool]) -> None:
        self._job, self._replaying = job, replaying
        self._secret = os.urandom(32)
        # As the ranks' own links do: without a secret of the job, nobody from another host is let in.
        self._server = socket.create_server(("" if job.options.secret else "127.0.0.1", 0))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock, self._lines, self._closing = threading.Lock(), set[Line](), False
        self._computing = (
            threading.Lock()
        )  # torch's switches (kernels, oneDNN), which a module may turn, are the process's
        self._threads: list[threading.Thread] = []
        _open.add(self)
        atexit.register(self.close)  # a loop that is never ended is ended when threads do not run any more
        self._accepting = threading.Thread(target=self._accept, name="ftcomm-parallel-replay", daemon=True)
        self._accepting.start()
        if job.store is not None:
            address = {"machine": machine(), "host": socket.gethostname(), "port": self._server.getsockname()[1]}
            address |= {"incarnation": job.incarnation, "secret": self._secret.hex()}
            job.store.set(_key(job, job.rank), json.dumps(address).encode())

    def close(self) -> None:
        """Waits for a micro-batch that is being computed; its replacement computes the rest itself."""
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
                continue
            with self._lock:
                if self._closing:
                    line.close()
                    return
                self._lines.add(line)
                thread = threading.Thread(target=self._serve, args=(line,), name="ftcomm-helping", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, line: Line) -> None:
        try:
            line.prove(self._secret, first=True)
            self._help(line.socket)
        except (OSError, EOFError, AuthenticationError, AssertionError):  # the last: a stranger with other words
            pass  # the replacement is through, or dead: the next one is welcome
        finally:
            with self._lock:
                self._lines.discard(line)
                line.close()

    def _help(self, line: socket.socket) -> None:
        greeting = receive(line)
        differ = differing(settings(), greeting["settings"])
        refusal = "it does steps again itself" if self._replaying() else ", ".join(differ)
        send(line, refusal)
        if refusal:
            return
        count, busy = 0, 0.0
        try:
            while True:
                structure, tensors = receive(line)
                items = receive(line)
                if not count:
                    self._job.emit("helping", slot=greeting["rank"])
                module, loss_of = unpack(Packed(structure, tensors))
                for item in items:
                    with self._computing:
                        start = time.monotonic()
                        done = compute(module, loss_of, item)
                        busy += time.monotonic() - start
                    send(line, done)
                    count += 1
        except (OSError, EOFError):
            raise
        except Exception as error:  # noqa: BLE001 - of the module, here: the replacement finds out whether it has it, too
            send(line, f"{type(error).__name__}: {error}")
        finally:
            if count:
                self._job.emit("helped", slot=greeting["rank"], micro_batches=count, busy=round(busy, 6))


def _close_in_child() -> None:
    """Workers of a DataLoader are forked while these are open: whoever waits at the other end is to see this process's end."""
    for one in tuple(_open):
        one.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
