"""DDP communication hooks."""

from typing import Any  # annotations are real here: DDP compares them with its own types

import torch
import torch.distributed as dist

from ftcomm.torch._extension import load

__all__ = ["lossy_hook"]


def lossy_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients over the ranks that contributed: ``ddp.register_comm_hook(None, ftcomm.torch.lossy_hook)``.

    Without a hook DDP divides by the world size before it adds, so that with a dead rank the sum comes out too small. A hook
    gets the plain gradients, and ftcomm's average divides each part by the number of its contributors.

    Args:
        state: the process group, or None for the default one.
    """
    group = state if state is not None else dist.group.WORLD
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group, async_op=True)
    return load().tensor_future(work)
