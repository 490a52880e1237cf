"""The C interface by ctypes, and ranks forked from the test that use nothing but it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from harness import after_fork

DEADLINE = 60.0
OK, PEER_FAILURE, STALE_EPOCH, TIMEOUT, MISMATCH, INVALID, INTERRUPTED, CLOSED = 0, 1, 3, 5, 6, 7, 8, 9
ALL_REDUCE, BARRIER = 0, 8
RAISE, LOSSY = 0, 1
FLOAT64 = 0

EventFn = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)
DoneFn = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class JobConfig(ctypes.Structure):
    _fields_ = [
        ("job", ctypes.c_char_p),
        ("rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("incarnation", ctypes.c_uint32),
        ("heartbeat", ctypes.c_double),
        ("timeout", ctypes.c_double),
        ("transport", ctypes.c_char_p),
        ("interface_", ctypes.c_char_p),
        ("host", ctypes.c_char_p),
        ("secret", ctypes.c_char_p),
        ("secret_len", ctypes.c_size_t),
        ("faults", ctypes.c_char_p),
        ("store", ctypes.c_void_p),
        ("authority", ctypes.c_char_p),
        ("policy", ctypes.c_int32),
        ("on_event", EventFn),
        ("event_context", ctypes.c_void_p),
        ("log_dir", ctypes.c_char_p),
        ("log_job", ctypes.c_char_p),
        ("log_limit", ctypes.c_uint64),
        ("log_spill", ctypes.c_char_p),
        ("log_spill_limit", ctypes.c_uint64),
        ("log_durability", ctypes.c_int32),
        ("log_remove", ctypes.c_int32),
        ("finished", ctypes.c_void_p),
        ("log_late", ctypes.c_int32),
        ("log_scope", ctypes.c_char_p),
    ]


class Op(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "dtype", "op", "algorithm", "root")),
        ("count", ctypes.c_uint64),
        ("send", ctypes.c_void_p),
        ("recv", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("send_counts", "send_offsets", "recv_counts", "recv_offsets")),
        ("factor", ctypes.c_double),
        ("timeout", ctypes.c_double),
    ]


def load() -> ctypes.CDLL:
    path = os.environ.get("LIBFTCOMM")  # a sanitizer's build, for example
    if not path:
        from ftcomm import _lib

        path = _lib.native_path("libftcomm.so")
    c = ctypes.CDLL(path)
    c.ft_last_error.restype = ctypes.c_char_p
    c.ft_job_close.restype = None
    c.ft_request_free.restype = None
    c.ft_job_epoch.restype = ctypes.c_uint64
    return c


class Error(Exception):
    def __init__(self, code: int, detail: dict[str, Any]) -> None:
        super().__init__(code, detail)
        self.code, self.detail = code, detail


class Job:
    """One ft_job; the exchange of addresses is the caller's function."""

    is_interruptible = False  # its start

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        exchange: Callable[[bytes], tuple[Sequence[bytes], int]],
        *,
        incarnation: int = 0,
        heartbeat: float = 1.0,
        transport: str = "auto",
        secret: bytes | None = None,
        faults: str = "",
        policy: int = 0,
        start_timeout: float = 30.0,
    ) -> None:
        self.c, self.rank, self.size = load(), rank, size
        self.events: list[dict[str, Any]] = []
        self._wake = os.pipe2(os.O_CLOEXEC)
        self._on_event = EventFn(self._event)
        config = JobConfig(
            job=name.encode(), rank=rank, world_size=size, incarnation=incarnation, heartbeat=heartbeat, timeout=60.0,
            transport=transport.encode(), secret=secret, secret_len=len(secret or b""), faults=faults.encode(),
            authority=b"auto", policy=policy, on_event=self._on_event,
        )  # fmt: skip
        self.handle = ctypes.c_void_p()
        try:
            self.check(self.c.ft_job_create(ctypes.byref(config), ctypes.byref(self.handle)))
            data, length = ctypes.c_void_p(), ctypes.c_size_t()
            self.check(self.c.ft_job_address(self.handle, ctypes.byref(data), ctypes.byref(length)))
            blobs, boot = exchange(ctypes.string_at(data.value or 0, length.value))
            addresses = (ctypes.c_char_p * size)(*blobs)
            lengths = (ctypes.c_size_t * size)(*(len(blob) for blob in blobs))
            wait = (ctypes.c_uint64(boot), int(incarnation > 0), ctypes.c_double(start_timeout))
            code = INTERRUPTED
            while code == INTERRUPTED:
                code = self.c.ft_job_start(self.handle, addresses, lengths, *wait)
                if self.is_interruptible:
                    break
            self.check(code)
        except BaseException:
            self.close()
            raise

    def check(self, code: int) -> None:
        if code != OK:
            raise Error(code, json.loads(self.c.ft_last_error() or b"{}"))

    def _event(self, _context: int, line: bytes) -> None:
        self.events.append({**json.loads(line), "seen": time.time()})
        os.write(self._wake[1], b".")

    def wait_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Blocks until there was such an event."""
        until = time.monotonic() + DEADLINE
        while True:
            for event in list(self.events):
                if event["kind"] == kind and all(event.get(key) == value for key, value in fields.items()):
                    return event
            ready, _, _ = select.select([self._wake[0]], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise AssertionError(f"no event {kind} {fields}; there were {self.events}")
            os.read(self._wake[0], 1)

    def comm(self, comm: int = 1, policy: int = RAISE) -> int:
        slots = (ctypes.c_int32 * self.size)(*range(self.size))
        self.check(
            self.c.ft_comm_create(
                self.handle, ctypes.c_uint64(comm), b"world", slots, self.size, policy, ctypes.c_double(0)
            )
        )
        return comm

    def post(self, comm: int, kind: int, values: Any = None) -> ctypes.c_void_p:
        count = len(values) if values is not None else 0
        op = Op(kind=kind, dtype=FLOAT64, count=count, recv=ctypes.addressof(values) if count else None, factor=1.0)
        request = ctypes.c_void_p()
        self.check(self.c.ft_collective(self.handle, ctypes.c_uint64(comm), ctypes.byref(op), ctypes.byref(request)))
        return request

    def wait(self, request: ctypes.c_void_p, timeout: float = DEADLINE) -> None:
        code = self.c.ft_request_wait(request, ctypes.c_double(timeout))
        error = Error(code, json.loads(self.c.ft_last_error())) if code != OK else None
        if code not in (TIMEOUT, INTERRUPTED):
            self.c.ft_request_free(request)
        if error:
            raise error

    def all_reduce(self, comm: int, values: Sequence[float]) -> list[float]:
        buffer = (ctypes.c_double * len(values))(*values)
        self.wait(self.post(comm, ALL_REDUCE, buffer))
        return list(buffer)

    def barrier(self, comm: int) -> None:
        self.wait(self.post(comm, BARRIER))

    def info(self) -> dict[str, Any]:
        buffer = ctypes.create_string_buffer(1 << 20)
        self.check(self.c.ft_job_info(self.handle, buffer, ctypes.c_size_t(len(buffer))))
        return dict(json.loads(buffer.value))

    def alive(self) -> list[int]:
        flags = (ctypes.c_uint8 * self.size)()
        self.check(self.c.ft_job_alive(self.handle, flags))
        return [rank for rank in range(self.size) if flags[rank]]

    def leave(self) -> None:
        self.check(self.c.ft_job_leave(self.handle, ctypes.c_double(30.0)))

    def close(self) -> None:
        self.c.ft_job_close(self.handle)
        self.handle = ctypes.c_void_p()
        for fd in self._wake:
            os.close(fd)


def job_name() -> str:
    """In a rank: the same in all that one test has started."""
    return f"native-{os.getppid()}"


class Ranks:
    """Processes forked from the test, each with a two-way message channel (a socket pair) to it."""

    def __init__(self) -> None:
        self.children: dict[int, tuple[int, int, Any]] = {}  # rank -> pid, pidfd, socket

    def spawn(self, rank: int, fn: Callable[[Channel], Any]) -> None:
        import socket

        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                here.close()
                for _, fd, sock in self.children.values():
                    os.close(fd)
                    sock.close()
                after_fork()
                channel = Channel(there)
                try:
                    channel.send(("result", fn(channel)))
                    status = 0
                except BaseException:
                    channel.send(("error", traceback.format_exc()))
            finally:
                os._exit(status)
        there.close()
        self.children[rank] = (pid, os.pidfd_open(pid), here)

    def start(self, size: int, body: Callable[[Channel, Job, int], Any], **options: Any) -> list[bytes]:
        """Each rank makes a lossy communicator of the job job_name(), says "ready", and runs body; returns their addresses."""

        def run(channel: Channel, rank: int) -> Any:
            job = Job(job_name(), rank, size, channel.exchange, **options)
            comm = job.comm(policy=LOSSY)
            job.barrier(comm)
            channel.send("ready")
            return body(channel, job, comm)

        for rank in range(size):
            self.spawn(rank, partial(run, rank=rank))
        addresses = self.exchange(range(size))
        for rank in range(size):
            assert self.receive(rank) == "ready"
        return addresses

    def kill(self, rank: int, sig: int = signal.SIGKILL) -> None:
        signal.pidfd_send_signal(self.children[rank][1], sig)

    def send(self, rank: int, message: Any) -> None:
        Channel(self.children[rank][2]).send(message)

    def receive(self, rank: int) -> Any:
        """The rank's next message; its failure is the test's."""
        message = Channel(self.children[rank][2]).receive()
        if isinstance(message, tuple) and message[0] == "error":
            raise AssertionError(f"rank {rank} failed:\n{message[1]}")
        return message

    def result(self, rank: int) -> Any:
        message = self.receive(rank)
        assert message[0] == "result", message
        return message[1]

    def exchange(self, ranks: Sequence[int], boot: int = 77) -> list[bytes]:
        """Collects the addresses of all ranks and hands them out."""
        blobs = [self.receive(rank) for rank in ranks]
        for rank in ranks:
            self.send(rank, (blobs, boot))
        return blobs

    def close(self) -> None:
        for pid, fd, sock in self.children.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(fd)
            sock.close()


class Channel:
    """Pickled messages over a stream socket."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock
        sock.settimeout(DEADLINE)

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        self.sock.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> Any:
        return pickle.loads(self._exactly(struct.unpack("<I", self._exactly(4))[0]))

    def exchange(self, blob: bytes) -> tuple[Sequence[bytes], int]:
        self.send(blob)
        blobs, boot = self.receive()
        return blobs, boot

    def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            part = self.sock.recv(n - len(data))
            if not part:
                raise EOFError("the other side has ended")
            data += part
        return data
