"""What Undo may copy: plain tensors, and the local shards of DTensors."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["address", "is_dtensor", "local", "no_copy", "no_fit", "version"]


def is_dtensor(value: Any) -> bool:
    """Whoever has a DTensor has imported its module: it is not imported for this question."""
    return type(value) is getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local(value: Any) -> Any:
    """What this process holds: a DTensor's own shard, for which nobody else is asked."""
    return value._local_tensor if is_dtensor(value) else value


def no_copy(value: Any) -> str:
    """Why a copy of these bits would not be all there is to the tensor; '' if it is."""
    held = local(value)
    if type(held) not in (torch.Tensor, torch.nn.Parameter):
        return f"{'a DTensor with shards of ' if is_dtensor(value) else 'a '}{type(held).__name__}"
    return "" if held.layout is torch.strided else f"a tensor of layout {held.layout}"


def no_fit(value: Any, buffer: Any) -> str:
    """Why the copy would be rounded or repeated if it were put back; '' if it would be the same bits."""
    now, was = ((one.dtype, tuple(one.shape)) for one in (local(value), buffer))
    return "" if now == was else f"was of {was[0]} and shape {was[1]}, and is of {now[0]} and shape {now[1]} now"


def version(value: Any) -> int:
    """How often it was written to; -1 if torch does not count."""
    return -1 if value.is_inference() else int(value._version)


def address(value: Any) -> int:
    """Where its memory is; 0 for a sparse one, which has several."""
    return int(value.data_ptr()) if value.layout is torch.strided else 0
