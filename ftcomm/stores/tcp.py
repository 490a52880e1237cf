"""The client of the TCP store."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Sequence

from ftcomm.errors import ConfigError, SystemFailure, Timeout
from ftcomm.stores import MAX_KEY, MAX_VALUE, Store, wire
from ftcomm.stores.tcp_server import TcpStoreServer, resolve

__all__ = ["TcpStore"]

_GRACE = 5.0  # an answer that is this late is a lost server
_LONGEST_WAIT = 20 * 86400.0  # the kernel takes milliseconds in 31 bits
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25


class TcpStore(Store):
    """Connects to ``host:port``; waits up to ``timeout`` seconds for the server to come up.

    ``came_up``: it did before its address was told, so that a refused connection says that it has ended. With ``server`` the
    client owns the server too and ends it at close().

    A call that fails closes its connection, and the next one makes a new one: an answer that comes too late must not be taken
    for that of the next question.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes = b"",
        timeout: float = 60.0,
        server: TcpStoreServer | None = None,
        *,
        came_up: bool = False,
    ) -> None:
        self._lock = threading.Lock()
        self._server = server
        self._address, self._secret = (host, port), secret
        self._where = f"{host}:{port}"
        self._connected = self._closed = self._released = False
        self._open(time.monotonic() + timeout, came_up)

    def _open(self, deadline: float, came_up: bool) -> None:
        self._parser = wire.Parser()
        self._sock = self._connect(deadline, came_up)
        try:
            self._handshake(self._secret)
        except BaseException:
            self._sock.close()
            raise
        self._connected = True

    def _connect(self, deadline: float, came_up: bool) -> socket.socket:
        family, kind, protocol, _, address = resolve(*self._address)
        pause = _FIRST_PAUSE
        while True:
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(max(0.001, min(_GRACE, deadline - time.monotonic())))
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                if came_up and isinstance(error, ConnectionError):
                    raise self._lost(error) from None
                if time.monotonic() + pause >= deadline:
                    raise Timeout(
                        f"The store at {self._where} did not come up in time ({error.strerror or error}). Rank 0 hosts it: "
                        "check that rank 0 runs and that MASTER_ADDR and MASTER_PORT are the same on every rank.",
                        ranks=(0,),
                        operation="rendezvous",
                    ) from None
                time.sleep(pause)  # nothing tells when another host begins to listen
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                wire.no_delay(sock)
                return sock

    def _handshake(self, secret: bytes) -> None:
        self._sock.settimeout(_GRACE)
        hello = self._take(len(wire.MAGIC) + wire.NONCE)
        if not hello.startswith(wire.MAGIC):
            raise ConfigError(
                f"Something else than an ftcomm store listens at {self._where}. Choose another MASTER_PORT (the same on "
                "every rank); where torch hosts the store, start the job through torch."
            )
        server_nonce, nonce = hello[len(wire.MAGIC) :], wire.challenge()
        try:
            self._sock.sendall(nonce + wire.proof(secret, b"client", server_nonce, nonce))
        except OSError as error:
            raise self._lost(error) from None
        answer = self._take(wire.PROOF)
        if not hmac.compare_digest(answer, wire.proof(secret, b"server", server_nonce, nonce)):
            raise ConfigError(
                f"The store at {self._where} has another secret. Give every rank the same FTCOMM_SECRET (or none)."
            )

    def _receive(self) -> None:
        try:
            data = self._sock.recv(65536)
        except TimeoutError:
            raise SystemFailure(f"The store at {self._where} does not answer.") from None
        except OSError as error:
            raise self._lost(error) from None
        if not data:
            raise SystemFailure(f"The store at {self._where} closed the connection; rank 0, its host, may have ended.")
        self._parser.feed(data)

    def _lost(self, error: OSError) -> SystemFailure:
        return SystemFailure(
            f"The connection to the store at {self._where} is lost ({error.strerror}); rank 0, its host, may have ended."
        )

    def _take(self, length: int) -> bytes:
        while (data := self._parser.take(length)) is None:
            self._receive()
        return data

    def _call(self, operation: int, *parts: bytes, wait: float = 0.0) -> list[bytes]:
        with self._lock:
            try:
                if not self._connected and not self._closed:
                    self._open(time.monotonic() + _GRACE, came_up=True)
                    if self._released:  # else its host would wait for this rank
                        self._ask(wire.RELEASE)
                return self._ask(operation, *parts, wait=wait)
            except BaseException:
                self._connected = False
                self._sock.close()
                raise

    def _ask(self, operation: int, *parts: bytes, wait: float = 0.0) -> list[bytes]:
        try:
            self._sock.settimeout(wait + _GRACE)
            self._sock.sendall(wire.pack(operation, *parts))
        except OSError as error:
            raise self._lost(error) from None
        try:
            while (frame := self._parser.next()) is None:
                self._receive()
            if frame[0] != operation:
                raise wire.Broken(f"the answer to operation {frame[0]} for that to {operation}")
        except wire.Broken as error:
            raise SystemFailure(f"The store at {self._where} sent {error}.") from None
        return frame[1]

    def get(self, key: str) -> bytes | None:
        return self._call(wire.GET, _key(key))[0] or None

    def set(self, key: str, value: bytes) -> None:
        self._call(wire.SET, _key(key), _value(value))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._call(wire.COMPARE_SET, _key(key), expected, _value(desired))[0]

    def wait(self, keys: Sequence[str], timeout: float) -> list[str]:
        timeout = min(timeout, _LONGEST_WAIT)
        milliseconds = max(0, round(timeout * 1000))
        parts = (milliseconds.to_bytes(8, "little"), *map(_key, keys))
        return [part.decode() for part in self._call(wire.WAIT, *parts, wait=timeout)]

    def release(self) -> None:
        self._released = True
        self._call(wire.RELEASE)

    def close(self) -> None:
        self._closed = True
        self._sock.close()
        if self._server is not None:
            self._server.close()


def _key(key: str) -> bytes:
    data = key.encode()
    if not data or len(data) > MAX_KEY:
        raise ConfigError(f"A store key must have 1 to {MAX_KEY} bytes; this one has {len(data)}: {key[:80]!r}.")
    return data


def _value(value: bytes) -> bytes:
    if not value or len(value) > MAX_VALUE:
        raise ConfigError(f"A store value must have 1 to {MAX_VALUE} bytes; this one has {len(value)}.")
    return value
