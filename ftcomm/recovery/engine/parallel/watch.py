"""Whether a computation leaves everything but its result as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ftcomm.communicator import Communicator
from ftcomm.recovery.determinism import capture_rng, restore_rng
from ftcomm.recovery.engine.message import Packed, pack, unpack
from ftcomm.recovery.engine.parallel.logged import ahead_of

__all__ = ["Watch", "copy_of", "equal"]


class Watch:
    """Around it: looks at a value, the generators, and what this rank has said to others.

    Args:
        value: the module and its loss function.
        whole: also at the content of parameters. They are large: afterwards their version counters have to do.

    Attributes:
        found: what it has done, as the end of a sentence; None: nothing.

    Raises:
        Exception: whatever pickle says of the value.
    """

    def __init__(self, value: Any, comm: Communicator, whole: bool) -> None:
        self._value, self._comm = value, comm
        self.found: str | None = None
        self._before = pack(value)
        # Batch normalisation changes its buffers behind the back of torch's counters.
        self._kept = [
            _copy(tensor) if whole or not isinstance(tensor, nn.Parameter) else None for tensor in self._before.tensors
        ]

    def copy(self) -> Any:
        """Of the value as it was before, if it was watched as a whole. Once: its tensors are those that were kept."""
        kept = [tensor for tensor in self._kept if tensor is not None]
        return unpack(Packed(self._before.structure, kept))

    def __enter__(self) -> None:
        self._versions = [tensor._version for tensor in self._before.tensors]
        self._drawn, self._ahead = capture_rng(), ahead_of(self._comm)
        self._noted = _noted(torch, "get_rng_state")
        self._asked = self._noted.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._noted.__exit__(None, None, None)
        if error is None:
            self.found = self._what()

    def undraw(self) -> None:
        """The generators stand where they stood."""
        restore_rng(self._drawn)

    def _what(self) -> str | None:
        now = ahead_of(self._comm)
        if self._asked or capture_rng() != self._drawn:
            return "uses the random generators"
        if (now.operations, now.since(self._ahead)) != (self._ahead.operations, self._ahead.since(self._ahead)):
            return "communicates"
        # Packed again: a buffer may be another tensor now, and a generator of the module's own is there by its state.
        after = pack(self._value)
        if after.structure != self._before.structure:
            return "changes the module"
        before = zip(self._before.tensors, self._versions, self._kept, strict=True)
        for new, (old, version, kept) in zip(after.tensors, before, strict=True):
            if not isinstance(old, nn.Parameter):
                if kept is not None and not equal(kept, new):
                    return "changes buffers or generators of the module"
            elif new is not old or new._version != version or not (kept is None or equal(kept, new)):
                return "changes parameters"
        return None


def copy_of(packed: Packed) -> Any:
    """With tensors of its own."""
    return unpack(Packed(packed.structure, [_copy(tensor) for tensor in packed.tensors]))


def equal(one: Tensor, other: Tensor) -> bool:
    """In all bits: NaN is what it was."""
    a, b = one.detach().contiguous().reshape(-1), other.detach().contiguous().reshape(-1)
    return bool(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


@contextlib.contextmanager
def _noted(owner: Any, name: str) -> Iterator[list[str]]:
    """Calls of it: activation checkpointing sets the generators of the process back and forth in the backward pass."""
    real, calls = getattr(owner, name), []

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(*args, **kwargs)

    setattr(owner, name, noted)
    try:
        yield calls
    finally:
        setattr(owner, name, real)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
