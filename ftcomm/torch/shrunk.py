"""Groups made by ``torch.distributed.shrink_group``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from ftcomm.torch.register import DEVICES

__all__ = ["serve_all_devices"]


def serve_all_devices(backend_class: type, adopt: Callable[[Any], None]) -> None:
    """From now on a shrunk group's backend serves the tensors of each device, as that of the group before it did.

    torch registers it for one device only: that which the group was bound to, or the CPU. On the others the first operation after
    the recovery would fail. And it takes it for NCCL's, or gloo's: a DistributedDataParallel that is made then reads it as one,
    and crashes. ``adopt`` is told of it, too.
    """
    made = getattr(distributed_c10d, "_create_shrunk_process_group", None)
    if made is None or hasattr(made, "_ftcomm"):
        return

    @functools.wraps(made)
    def create(new_backend: Any, *args: Any, **more: Any) -> Any:
        group = made(new_backend, *args, **more)
        if isinstance(new_backend, backend_class):
            adopt(new_backend)
            for device in DEVICES:
                group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, new_backend)
            group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        return group

    create._ftcomm = True  # type: ignore[attr-defined]
    distributed_c10d._create_shrunk_process_group = create
