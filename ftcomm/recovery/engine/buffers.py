"""Buffers of a replicated module, such as batch normalisation's running means: one rank's for all."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["share_buffers"]


def share_buffers(everybody: Any, module: Any, root: int) -> None:
    """Collective: all get the root's buffers.

    Raises:
        PeerFailure: on all ranks; the root has died, and no survivor has all of them. Nothing was changed.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.numel()]
    if not buffers:
        return
    flat = torch.cat([buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
    everybody.broadcast(flat, root=root)
    at = 0
    with torch.no_grad():
        for buffer in buffers:
            size = buffer.numel() * buffer.element_size()
            buffer.copy_(flat[at : at + size].clone().view(buffer.dtype).reshape(buffer.shape))
            at += size
