"""What Undo may copy: plain tensors, and the local shards of DTensors."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["address", "is_dtensor", "local", "no_copy", "no_fit", "version"]


# Asked of each parameter and state at each step: one look at the type for all but DTensors.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_dtensor(value: Any) -> bool:
    """Whoever has a DTensor has imported its module: it is not imported for this question."""
    return type(value) not in _PLAIN and type(value) is getattr(
        sys.modules.get("torch.distributed.tensor"), "DTensor", None
    )


def local(value: Any) -> Any:
    """What this process holds: a DTensor's own shard, for which nobody else is asked."""
    return value if type(value) in _PLAIN or not is_dtensor(value) else value._local_tensor


def no_copy(value: Any) -> str:
    """Why a copy of these bits would not be all there is to the tensor; '' if it is."""
    held = local(value)
    if type(held) not in _PLAIN:
        return f"{'a DTensor with shards of ' if is_dtensor(value) else 'a '}{type(held).__name__}"
    return "" if held.layout is torch.strided else f"a tensor of layout {held.layout}"


def no_fit(value: Any, buffer: Any) -> str:
    """Why the copy would be rounded or repeated if it were put back; '' if it would be the same bits."""
    now, was = ((one.dtype, tuple(one.shape)) for one in (local(value), buffer))
    return "" if now == was else f"was of {was[0]} and shape {was[1]}, and is of {now[0]} and shape {now[1]} now"


def version(value: Any) -> int:
    """How often it was written to; -1 if torch does not count, as for what was made in inference mode."""
    try:
        return int(value._version)
    except RuntimeError:
        return -1


def address(value: Any) -> int:
    """Where the memory of this process's part is; 0 for a sparse one, which has several."""
    try:
        return int(local(value).data_ptr())
    except RuntimeError:
        return 0
