"""Tensors as blocks of bytes in memory of the CPU, to send or to receive into."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ftcomm._lib import lib
from ftcomm.torch.transfer_plan import cut

__all__ = ["Blocks", "checksum", "digest", "sample"]


def checksum(data: torch.Tensor) -> int:
    """CRC-32C of bytes."""
    ffi, C = lib()
    return int(C.ft_crc32c(ffi.cast("void*", data.data_ptr()), data.numel(), 0))


def digest(tensor: torch.Tensor) -> int:
    """CRC-32C of a tensor's content, on whatever device and in whatever layout it is; 0 if it has none."""
    data = tensor.detach().cpu().contiguous()
    return checksum(_bytes(data)) if data.numel() else 0


def sample(tensors: Sequence[torch.Tensor]) -> int:
    """CRC-32C of the sizes, and of the first and last cache line, of tensors in memory of the CPU: a look, not a proof.

    Of those that do not lie in one piece only that they are there. All is asked anew: ``.data`` may be another one each time.
    """
    ffi, C = lib()
    data = ffi.new("uintptr_t[]", [tensor.data_ptr() for tensor in tensors])
    sizes = ffi.new("size_t[]", [tensor.nbytes if tensor.is_contiguous() else 0 for tensor in tensors])
    return int(C.ft_sample(ffi.cast("void*const*", data), sizes, len(tensors)))


class Blocks:
    """The same blocks on both sides: how they are cut depends on the tensors' sizes only, not on where they are.

    A piece of a large tensor in memory of the CPU is sent from there and received there; all else is copied.

    Attributes:
        plan: what is in which block.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], own: Collection[int] = ()) -> None:
        self._tensors = tensors
        self.plan = cut([tensor.numel() * tensor.element_size() for tensor in tensors], own)
        self._copied: tuple[int, torch.Tensor] | None = None  # the last tensor read that is not contiguous
        self._staged: dict[int, torch.Tensor] = {}  # what has come for tensors that are not contiguous

    def read(self, number: int) -> torch.Tensor:
        """The bytes of a block. Not to be written to: they may be the tensor's own."""
        pieces = [self._source(index)[at : at + size].cpu() for index, at, size in self.plan[number].pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def room(self, number: int) -> torch.Tensor:
        """Where a block is to be received; then :meth:`put` it."""
        pieces = self.plan[number].pieces
        if len(pieces) == 1:
            index, at, size = pieces[0]
            to = self._target(index)
            if to.device.type == "cpu":
                return to[at : at + size]
        return torch.empty(self.plan[number].nbytes, dtype=torch.uint8)

    def put(self, number: int, room: torch.Tensor) -> None:
        """Puts what came into the tensors."""
        start = 0
        for index, at, size in self.plan[number].pieces:
            to = self._target(index)[at : at + size]
            if to.data_ptr() != room.data_ptr():
                to.copy_(room[start : start + size])
            start += size

    def finish(self) -> None:
        """All blocks are there."""
        for index, whole in self._staged.items():
            self._tensors[index].detach().copy_(whole)
        self._staged.clear()

    def _source(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index]
        if tensor.is_contiguous():
            return _bytes(tensor)
        if self._copied is None or self._copied[0] != index:
            self._copied = (index, tensor.detach().contiguous())
        return _bytes(self._copied[1])

    def _target(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index]
        if tensor.is_contiguous():
            return _bytes(tensor)
        if index not in self._staged:
            self._staged[index] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return _bytes(self._staged[index])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
