"""Frames and handshake of the TCP store. Lengths are bounded before anything is allocated."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct

from ftcomm.stores import MAX_KEY, MAX_VALUE

__all__ = ["COMPARE_SET", "GET", "RELEASE", "SET", "WAIT", "Broken", "Parser", "challenge", "pack", "proof"]

GET, SET, COMPARE_SET, WAIT, RELEASE = range(1, 6)
MAGIC = b"ftcommS1"
NONCE = 32
PROOF = 32
# In place of the server's proof. It is said, so that a server that dies is not taken for one that refuses.
REFUSED = bytes(PROOF)
MAX_FIELDS = 4096  # a wait for one key of each of 1024 ranks
MAX_FRAME = 4 * MAX_VALUE
_HEAD = struct.Struct("<IBH")  # bytes after the head, operation or status, number of fields
_LENGTH = struct.Struct("<I")


class Broken(Exception):
    """The other side does not speak this protocol, or sent more than it may."""


def pack(operation: int, *parts: bytes) -> bytes:
    """One frame: a head, then each field with its length."""
    body = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return _HEAD.pack(len(body), operation, len(parts)) + body


def unpack(count: int, body: bytes) -> list[bytes]:
    """The fields of a body; raises Broken if they do not fill it exactly."""
    parts, at = [], 0
    for _ in range(count):
        if at + _LENGTH.size > len(body):
            raise Broken("a field is cut off")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if length > len(body) - at:
            raise Broken("a field is longer than its frame")
        parts.append(body[at : at + length])
        at += length
    if at != len(body):
        raise Broken("a frame has bytes that belong to no field")
    return parts


class Parser:
    """Collects bytes and gives whole frames as ``(operation, fields)``."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> tuple[int, list[bytes]] | None:
        if len(self._data) < _HEAD.size:
            return None
        length, operation, count = _HEAD.unpack_from(self._data)
        if length > MAX_FRAME or count > MAX_FIELDS:
            raise Broken(f"a frame of {length} bytes and {count} fields is over the limit")
        if len(self._data) < _HEAD.size + length:
            return None
        body = bytes(self._data[_HEAD.size : _HEAD.size + length])
        del self._data[: _HEAD.size + length]
        return operation, unpack(count, body)

    def take(self, length: int) -> bytes | None:
        """The next ``length`` raw bytes, once they are there (handshake)."""
        if len(self._data) < length:
            return None
        data = bytes(self._data[:length])
        del self._data[:length]
        return data


def challenge() -> bytes:
    return os.urandom(NONCE)


def proof(secret: bytes, who: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Shows that ``who`` knows the secret; both nonces are in it, so neither side's proof can be played back."""
    return hmac.new(secret, MAGIC + who + server_nonce + client_nonce, hashlib.sha256).digest()


def checked_key(key: bytes) -> str:
    if not key or len(key) > MAX_KEY:
        raise Broken(f"a key of {len(key)} bytes")
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise Broken("a key that is not text") from None


def is_loopback(address: tuple[str, ...] | str) -> bool:
    """For a numeric address as getsockname() or getaddrinfo() gives it."""
    import ipaddress

    text = address if isinstance(address, str) else address[0]
    return ipaddress.ip_address(text.split("%")[0]).is_loopback


def no_delay(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
