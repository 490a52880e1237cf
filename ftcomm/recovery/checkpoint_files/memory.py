"""The tensors of a state in CPU memory: what they share stays shared, and what no tensor shows is left behind.

torch.save writes whole storages: a row of a large matrix would take the matrix with it. So each run of memory that tensors
show gets a storage of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ftcomm.errors import ConfigError

__all__ = ["Buffers", "Tensors"]

# Copies are of bits: not all types have all copies, and none must touch a NaN.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffers:
    """Memory that is used again by the next save, if that is of the same sizes."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() for buffer in self._held)

    def take(self, sizes: list[int]) -> list[Any]:
        held = self._held + [None] * (len(sizes) - len(self._held))
        self._held = [
            _empty(size) if buffer is None or buffer.numel() != size else buffer
            for size, buffer in zip(sizes, held, strict=False)
        ]
        return list(self._held)


@dataclass
class _Shown:
    """A tensor of the state, the one that takes its place, and the addresses of its bytes."""

    source: Any
    twin: Any
    path: str
    first: int
    end: int

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.first, self.source.shape, self.source.stride()


class Tensors:
    """Collects tensors, and then gives them their memory."""

    def __init__(self) -> None:
        self._shown: list[_Shown] = []

    def add(self, tensor: Any, path: str) -> Any:
        """Returns the tensor that takes its place; it has no memory before :meth:`place`."""
        _check(tensor, path)
        source = tensor.detach().resolve_conj().resolve_neg()
        twin = torch.empty(0, dtype=source.dtype, device="cpu")
        if source.numel() == 0:
            return twin.resize_(source.shape)
        last = sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        first = source.data_ptr()
        self._shown.append(_Shown(source, twin, path, first, first + (last + 1) * source.element_size()))
        return twin

    def place(self, buffers: Buffers | None) -> None:
        """Copies into the buffers; None: CPU tensors that show all of their storage are written from where they are."""
        runs = [_Run(shown) for shown in self._runs()]
        if buffers is None:
            copied = [run for run in runs if not run.whole]
            memory = [_empty(run.nbytes) for run in copied]
            for run in runs:
                if run.whole:
                    run.show(run.shown[0].source.untyped_storage())
        else:
            copied, memory = runs, buffers.take([run.nbytes for run in runs])
        for run, buffer in zip(copied, memory, strict=True):
            run.copy(buffer)
            run.show(buffer.untyped_storage())

    def _runs(self) -> list[list[_Shown]]:
        """Tensors that overlap, directly or by others between them."""
        runs: list[list[_Shown]] = []
        end, device = 0, None
        for one in sorted(self._shown, key=lambda one: (str(one.source.device), one.first, one.end)):
            if runs and one.source.device == device and one.first < end:
                runs[-1].append(one)
                end = max(end, one.end)
            else:
                runs.append([one])
                end, device = one.end, one.source.device
        return runs


class _Run:
    """Memory that one tensor shows, or several that overlap."""

    def __init__(self, shown: list[_Shown]) -> None:
        self.shown = shown
        one = shown[0]
        self.first = one.first
        span = max(other.end for other in shown) - self.first
        for other in shown[1:]:
            size = other.source.element_size()
            if other.source.dtype != one.source.dtype or (other.first - self.first) % size:
                raise ConfigError(
                    f"The state can't be saved: {one.path} ({one.source.dtype}) and {other.path} ({other.source.dtype}) are two "
                    "types in the same memory, which torch.save does not write. Save one of them, or a clone()."
                )
        alike = all(other.layout == one.layout for other in shown)
        dense = one.source.numel() * one.source.element_size()
        # One tensor with gaps between its elements: without them. Several with gaps share what is between, too.
        self.packed = alike and dense < span
        self.nbytes = dense if self.packed else span
        storage = one.source.untyped_storage()
        self.whole = (
            one.source.device.type == "cpu"
            and not self.packed
            and storage.data_ptr() == self.first
            and storage.nbytes() == span
        )

    def copy(self, buffer: Any) -> None:
        one = self.shown[0].source
        if self.packed:
            to = buffer.view(one.dtype).view(one.shape)
            bits = _BITS.get(one.element_size(), one.dtype)
            to.view(bits).copy_(one.view(bits))
            return
        for (first, end), source in {(one.first, one.end): one.source for one in self.shown}.items():
            buffer[first - self.first : end - self.first].copy_(_bytes(source, first, end))

    def show(self, storage: Any) -> None:
        for one in self.shown:
            source = one.source
            if self.packed:
                one.twin.set_(storage, 0, source.shape, torch.empty(source.shape, device="meta").stride())
            else:
                offset = (one.first - self.first) // source.element_size()
                one.twin.set_(storage, offset, source.shape, source.stride())


def _empty(size: int) -> Any:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _bytes(source: Any, first: int, end: int) -> Any:
    storage = source.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=source.device)
    return view.set_(storage, first - storage.data_ptr(), (end - first,), (1,))


def _check(tensor: Any, path: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        what = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ConfigError(
            f"The state can't be saved: {path} is a tensor of another kind than dense ones ({what}). Save to_dense(), "
            "dequantize(), or its parts."
        )
    if tensor.numel() and (tensor.is_meta or not tensor.data_ptr()):
        raise ConfigError(
            f"The state can't be saved: {path} is a tensor on {tensor.device} whose memory can't be seen. "
            "Save cpu() of it; a tensor on the meta device has nothing to save."
        )
