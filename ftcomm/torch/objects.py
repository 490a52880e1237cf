"""A replacement that is not admitted yet gets no objects from another rank: torch would unpickle memory that nobody filled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ftcomm.errors import Unsupported
from ftcomm.options import POLICIES
from ftcomm.torch.errors import BackendError

__all__ = ["refuse_objects_outside"]


def refuse_objects_outside(backend_of: Callable[[Any], Any]) -> None:
    """From now on such a process gets an error from ``broadcast_object_list`` and ``scatter_object_list``, as from a message.

    Of a tensor it keeps what it has, which is something. Of objects it would have a random size, and no content. (A name that a
    script imported out of torch before its first group is still torch's own.)

    Args:
        backend_of: the native backend of a process group, or None where it is another one.
    """
    for name in ("broadcast_object_list", "scatter_object_list"):
        known = getattr(distributed_c10d, name)
        if not hasattr(known, "_ftcomm"):
            made = _refusing(name, known, backend_of)
            for module in (distributed_c10d, dist):
                setattr(module, name, made)


def _refusing(name: str, known: Callable[..., Any], backend_of: Callable[[Any], Any]) -> Callable[..., Any]:
    arguments = inspect.signature(known)

    @functools.wraps(known)
    def around(*args: Any, **more: Any) -> Any:
        given = arguments.bind(*args, **more).arguments
        group = given.get("group") or dist.group.WORLD
        backend = backend_of(group) if isinstance(group, dist.ProcessGroup) else None
        if backend is None or POLICIES[backend.policy] == "replay" or not backend.solo:
            return known(*args, **more)
        root = given.get("group_src")
        if root is None:
            root = dist.get_group_rank(group, given.get("src") or 0)
        if root == group.rank():
            return known(*args, **more)
        message = (
            f"{name} of {backend.comm_name} waits for objects of rank {root}, and this replacement is not admitted yet: it gets "
            "nothing from others before its first join point. Compute them here, read them from a disk, or call it after that."
        )
        raise BackendError(message) from Unsupported(message, operation=name)

    around._ftcomm = True  # type: ignore[attr-defined]
    return around
