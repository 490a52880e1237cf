"""Under ``lossy``: what DistributedDataParallel broadcasts from rank 0 comes from another rank when that is dead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = ["serve_replicas"]


def serve_replicas(backend_of: Callable[[Any], Any]) -> None:
    """From now on, around what DDP does before and behind a forward pass: it hands round buffers, and the order of its buckets.

    Its ranks are replicas, so the lowest living one has what the dead one would have sent. Of other broadcasts, the script's,
    that is not so: they fail when their root is dead.

    Args:
        backend_of: the native backend of a process group, or None where it is another one.
    """
    for name in ("_pre_forward", "_post_forward", "_sync_buffers"):
        known = getattr(DistributedDataParallel, name, None)
        if known is not None and not hasattr(known, "_ftcomm"):
            around = _standing_in(known, backend_of)
            # torch.compile leaves the others alone (below), and calls this one as it is.
            made: Any = torch.compiler.disable(around) if name == "_sync_buffers" else around
            made._ftcomm = True
            setattr(DistributedDataParallel, name, made)


def _standing_in(known: Callable[..., Any], backend_of: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(known)
    def around(ddp: Any, *args: Any, **more: Any) -> Any:
        if torch.compiler.is_compiling():
            return known(ddp, *args, **more)
        backend = backend_of(ddp.process_group)
        if backend is None or backend.stand_in:
            return known(ddp, *args, **more)
        backend.stand_in = True
        try:
            return known(ddp, *args, **more)
        finally:
            backend.stand_in = False

    return around
