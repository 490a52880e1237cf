"""Python values as bytes, tensors beside them: a tensor comes out with the same bits, strides and place within a cache line.

The place matters: matrix libraries choose their first and last iterations by it, and so the order of a sum.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Frame", "Packed", "framed", "join", "pack", "receive", "receive_framed", "send", "split", "unpack"]

_LINE = 64  # bytes
_LENGTH = struct.Struct("!Q")


class Packed(NamedTuple):
    """A value: its structure, and its tensors in the order in which the structure names them."""

    structure: bytes
    tensors: list[Tensor]


class _Meta(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    place: int  # of its first byte in a cache line
    wants_grad: bool
    parameter: bool


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=5)
        self.tensors: list[Tensor] = []
        self._known: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return None
        if type(thing) not in (Tensor, nn.Parameter):
            raise pickle.PicklingError(f"a tensor of the class {type(thing).__name__}")
        if thing.layout != torch.strided or thing.device.type != "cpu":
            raise pickle.PicklingError(f"a tensor with layout {thing.layout} on {thing.device}")
        if id(thing) not in self._known:  # one that is there twice (tied weights) stays one
            self._known[id(thing)] = len(self.tensors)
            self.tensors.append(thing)
        return self._known[id(thing)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]


def pack(value: Any) -> Packed:
    """The tensors are the value's own, not copies.

    Raises:
        Exception: whatever pickle says of a value that it can't take.
    """
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(value)
    return Packed(out.getvalue(), pickler.tensors)


def unpack(packed: Packed) -> Any:
    """A copy of what was packed; its tensors are those given."""
    return _Unpickler(*packed).load()


def join(tensors: Sequence[Tensor]) -> tuple[bytes, Tensor]:
    """What is needed to make them elsewhere: descriptions, and all their bytes in one buffer."""
    metas = [
        _Meta(
            t.dtype,
            tuple(t.size()),
            t.stride(),
            t.data_ptr() % _LINE,
            t.requires_grad and t.is_leaf,
            type(t) is nn.Parameter,
        )
        for t in tensors
    ]
    places, total = _places(metas)
    buffer = torch.empty(total, dtype=torch.uint8)
    with torch.no_grad():
        for tensor, meta, at in zip(tensors, metas, places, strict=True):
            _compact(buffer, meta, at).copy_(tensor)
    return pickle.dumps(metas), buffer


def split(described: bytes, buffer: Tensor) -> list[Tensor]:
    """The tensors of :func:`join`, in the buffer where they can be."""
    metas: list[_Meta] = pickle.loads(described)
    found = []
    for meta, at in zip(metas, _places(metas)[0], strict=True):
        value = _strided(_compact(buffer, meta, at), meta)
        found.append(nn.Parameter(value, meta.wants_grad) if meta.parameter else value.requires_grad_(meta.wants_grad))
    return found


class Frame(NamedTuple):
    """A value as it is sent: a copy of its tensors, for any number of lines."""

    head: bytes
    buffer: Tensor


def framed(value: Any) -> Frame:
    structure, tensors = pack(value)
    described, buffer = join(tensors)
    head = pickle.dumps((structure, described, buffer.numel()))
    return Frame(_LENGTH.pack(len(head)) + head, buffer)


def send(line: socket.socket, value: Any) -> None:
    """
    Raises:
        OSError: the other end is gone.
    """
    head, buffer = value if isinstance(value, Frame) else framed(value)
    line.sendall(head)
    line.sendall(memoryview(buffer.numpy()))


def receive(line: socket.socket) -> Any:
    """What the other end has sent. It has to be authenticated: a pickle is a program.

    Raises:
        OSError, EOFError: the other end is gone.
    """
    return receive_framed(line)[0]


def receive_framed(line: socket.socket) -> tuple[Any, Tensor]:
    """The same, and the buffer that all its tensors are in."""
    head = bytearray(_LENGTH.unpack(_fill(line, bytearray(_LENGTH.size)))[0])
    structure, described, total = pickle.loads(_fill(line, head))
    buffer = torch.empty(total, dtype=torch.uint8)
    _fill(line, buffer.numpy())
    return unpack(Packed(structure, split(described, buffer))), buffer


def _fill(line: socket.socket, room: Any) -> Any:
    """Right where it is to be: tensors of many megabytes come."""
    left = memoryview(room)
    while left.nbytes:
        count = line.recv_into(left)
        if count == 0:
            raise EOFError("the other end is gone")
        left = left[count:]
    return room


def _places(metas: Sequence[_Meta]) -> tuple[list[int], int]:
    """Where each begins in the buffer, which begins with a cache line itself; and the buffer's size."""
    places, end = [], 0
    for meta in metas:
        at = -(-end // _LINE) * _LINE + meta.place
        places.append(at)
        end = at + meta.dtype.itemsize * _count(meta.size)
    return places, end


def _count(size: Sequence[int]) -> int:
    count = 1
    for n in size:
        count *= n
    return count


def _compact(buffer: Tensor, meta: _Meta, at: int) -> Tensor:
    end = at + meta.dtype.itemsize * _count(meta.size)
    return buffer[at:end].view(meta.dtype).view(meta.size)


def _strided(compact: Tensor, meta: _Meta) -> Tensor:
    if compact.stride() == meta.stride or compact.numel() < 2:
        return compact
    bytes_of = meta.dtype.itemsize
    extent = 1 + sum((n - 1) * s for n, s in zip(meta.size, meta.stride, strict=True))
    room = torch.empty(meta.place + extent * bytes_of, dtype=torch.uint8)[meta.place :].view(meta.dtype)
    once = [1 if s == 0 else n for n, s in zip(meta.size, meta.stride, strict=True)]  # expanded: one value for all
    room.as_strided(once, meta.stride).copy_(compact[tuple(slice(n) for n in once)])
    return room.as_strided(meta.size, meta.stride)
