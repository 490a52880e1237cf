"""The server of the TCP store: one thread in rank 0 (or in a launcher), no disk, gone with its process."""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field

from ftcomm.errors import ConfigError, SystemFailure
from ftcomm.stores import MAX_VALUE, wire

__all__ = ["TcpStoreServer"]

_servers: weakref.WeakSet[TcpStoreServer] = weakref.WeakSet()
_HANDSHAKE_SECONDS = 10.0
_ANY = {int(socket.AF_INET): "0.0.0.0", int(socket.AF_INET6): "::"}
_LONGEST_WAIT = 86400.0  # at a time: the kernel takes milliseconds in 31 bits


@dataclass(eq=False)
class _Client:
    sock: socket.socket
    nonce: bytes
    deadline: float  # for the handshake, then none
    parser: wire.Parser = field(default_factory=wire.Parser)
    output: bytearray = field(default_factory=bytearray)
    known: bool = False
    released: bool = False


@dataclass(eq=False)
class _Wait:
    client: _Client
    missing: dict[str, None]  # in the order of the question
    deadline: float


class TcpStoreServer:
    """Listens on ``host:port`` (port 0: any) until :meth:`close`.

    Without a secret it listens on loopback addresses only: the addresses that the ranks publish decide whom they connect to.

    Attributes:
        expected: so many clients are on their way here, sooner or later; close() waits for them, too.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, secret: bytes = b"") -> None:
        self.expected = 0
        self._came = 0
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._clients: set[_Client] = set()
        self._waits: set[_Wait] = set()
        self._waits_for: dict[str, set[_Wait]] = {}  # by the keys that they miss: a set must not look at all of them
        self._closing_until: float | None = None
        self._listener = self._listen(host, port)
        where, at = self._listener.getsockname()[:2]
        self.address: tuple[str, int] = (host if where in _ANY.values() else where, at)
        self._wake: tuple[int, ...] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        _servers.add(self)
        self._thread = threading.Thread(target=self._run, name="ftcomm-store", daemon=True)
        self._thread.start()

    def _listen(self, host: str, port: int) -> socket.socket:
        family, kind, protocol, _, address = to_listen_at(host, port) if self._secret else resolve(host, port)
        if not self._secret and not wire.is_loopback(str(address[0])):
            raise ConfigError(
                f"The store address {host} is not a loopback address and there is no job secret: anybody on the network "
                "could join. Set FTCOMM_SECRET to the same text on every rank, or use 127.0.0.1 on one host."
            )
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"Port {port} on {host} is in use by another program. Choose another MASTER_PORT (the same on every rank)."
                ) from None
            raise SystemFailure(f"The store can't listen on {host} port {port}: {error.strerror}.") from None
        return listener

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._may_end():
            for key, events in self._selector.select(self._time_left()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake[0]:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake[0], 64)
                else:
                    self._serve(key.data, events)
            self._expire()
        for client in tuple(self._clients):
            self._drop(client)
        self._selector.close()
        self._listener.close()

    def _may_end(self) -> bool:
        if self._closing_until is None:
            return False
        done = self._came >= self.expected and all(client.released for client in self._clients)
        return done or time.monotonic() >= self._closing_until

    def _time_left(self) -> float | None:
        deadlines = [wait.deadline for wait in self._waits]
        deadlines += [client.deadline for client in self._clients if not client.known]
        if self._closing_until is not None:
            deadlines.append(self._closing_until)
        return min(max(0.0, min(deadlines) - time.monotonic()), _LONGEST_WAIT) if deadlines else None

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the other side went away again, or there are no descriptors left: it will try once more
            return
        sock.setblocking(False)
        wire.no_delay(sock)
        client = _Client(sock, wire.challenge(), time.monotonic() + _HANDSHAKE_SECONDS)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)
        self._send(client, wire.MAGIC + client.nonce)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ and client in self._clients:
                data = client.sock.recv(65536)
                if not data:
                    self._drop(client)
                    return
                client.parser.feed(data)
                if client.known or self._handshake(client):
                    while client in self._clients and (frame := client.parser.next()) is not None:
                        self._answer(client, *frame)
        except BlockingIOError:
            return
        except (OSError, wire.Broken):
            self._drop(client)

    def _handshake(self, client: _Client) -> bool:
        data = client.parser.take(wire.NONCE + wire.PROOF)
        if data is None:
            return False
        nonce, given = data[: wire.NONCE], data[wire.NONCE :]
        if not hmac.compare_digest(given, wire.proof(self._secret, b"client", client.nonce, nonce)):
            self._send(client, wire.REFUSED)
            self._drop(client)
            return False
        client.known = True
        self._came += 1
        self._send(client, wire.proof(self._secret, b"server", client.nonce, nonce))
        return True

    def _answer(self, client: _Client, operation: int, parts: list[bytes]) -> None:
        if operation == wire.WAIT and len(parts) >= 1 and len(parts[0]) == 8:
            seconds = int.from_bytes(parts[0], "little") / 1000
            keys = [wire.checked_key(part) for part in parts[1:]]
            missing = {key: None for key in keys if key not in self._values}
            self._begin_wait(_Wait(client, missing, time.monotonic() + seconds))
        elif operation == wire.GET and len(parts) == 1:
            value = self._values.get(wire.checked_key(parts[0]), b"")
            self._send(client, wire.pack(operation, value))
        elif operation == wire.SET and len(parts) == 2:
            self._store(wire.checked_key(parts[0]), parts[1])
            self._send(client, wire.pack(operation))
        elif operation == wire.COMPARE_SET and len(parts) == 3:
            key = wire.checked_key(parts[0])
            if self._values.get(key, b"") == parts[1]:
                self._store(key, parts[2])
            self._send(client, wire.pack(operation, self._values.get(key, b"")))
        elif operation == wire.RELEASE and not parts:
            client.released = True
            self._send(client, wire.pack(operation))
        else:
            raise wire.Broken(f"operation {operation} with {len(parts)} fields")

    def _store(self, key: str, value: bytes) -> None:
        if not value or len(value) > MAX_VALUE:
            raise wire.Broken(f"a value of {len(value)} bytes")
        self._values[key] = value
        for wait in self._waits_for.pop(key, ()):
            del wait.missing[key]
            if not wait.missing:
                self._end_wait(wait)

    def _begin_wait(self, wait: _Wait) -> None:
        self._waits.add(wait)
        for key in wait.missing:
            self._waits_for.setdefault(key, set()).add(wait)
        if not wait.missing or time.monotonic() >= wait.deadline:
            self._end_wait(wait)

    def _end_wait(self, wait: _Wait) -> None:
        self._forget_wait(wait)
        self._send(wait.client, wire.pack(wire.WAIT, *(key.encode() for key in wait.missing)))

    def _forget_wait(self, wait: _Wait) -> None:
        self._waits.discard(wait)
        for key in wait.missing:
            if waits := self._waits_for.get(key):  # not of a key that is being set: its client may go meanwhile
                waits.discard(wait)
                if not waits:
                    del self._waits_for[key]

    def _expire(self) -> None:
        now = time.monotonic()
        for wait in [wait for wait in self._waits if now >= wait.deadline]:
            self._end_wait(wait)
        for client in tuple(self._clients):
            if not client.known and now >= client.deadline:
                self._drop(client)

    def _send(self, client: _Client, data: bytes) -> None:
        client.output += data
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            while client.output:
                del client.output[: client.sock.send(client.output)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.output else 0)
        self._selector.modify(client.sock, events, client)

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.discard(client)
            for wait in [wait for wait in self._waits if wait.client is client]:
                self._forget_wait(wait)
            self._selector.unregister(client.sock)
            client.sock.close()

    # -- the owner -----------------------------------------------------------------------------------------------

    def close(self, linger: float = 5.0) -> None:
        """Ends the thread once every client has come, and has gone or said that it has started; after ``linger`` seconds at the
        latest.
        """
        if self._thread.is_alive():
            self._closing_until = time.monotonic() + linger
            os.write(self._wake[1], b"x")
            self._thread.join()
        fds, self._wake = self._wake, ()
        for fd in fds:
            os.close(fd)

    def close_in_child(self) -> None:
        """After fork: the child must not keep the port or the connections open."""
        for sock in (self._listener, *(client.sock for client in tuple(self._clients))):
            sock.close()
        self._selector.close()


def to_listen_at(host: str, port: int) -> tuple[int, int, int, str, tuple[str | int, ...]]:
    """As :func:`resolve`; but a name that leads to the loopback device is listened for everywhere.

    Debian and Ubuntu give a host's own name 127.0.1.1, where no other host comes. Who means that device says localhost, or an
    address.
    """
    found = resolve(host, port)
    family, address = found[0], found[4]
    named = host != "localhost" and not _is_address(host)
    return (*found[:4], (_ANY[family], *address[1:])) if named and wire.is_loopback(str(address[0])) else found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolve(host: str, port: int) -> tuple[int, int, int, str, tuple[str | int, ...]]:
    """The first address of a host, as getaddrinfo gives it."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]  # type: ignore[return-value]
    except socket.gaierror as error:
        raise ConfigError(
            f"The store address {host!r} can't be resolved: {error.strerror}. Check MASTER_ADDR."
        ) from None


def _close_in_child() -> None:
    for server in tuple(_servers):
        server.close_in_child()
    _servers.clear()


os.register_at_fork(after_in_child=_close_in_child)
