"""Makes the backend known to torch. Loads nothing else: torch runs this when it is imported itself."""

from __future__ import annotations

from typing import Any

__all__ = ["DEVICES", "register_backend"]

DEVICES = ("cpu", "cuda")


def register_backend() -> None:
    """Registers ``ftcomm`` for CPU and CUDA tensors, and the init method ``mpi://``; a second call does nothing.

    The extension is loaded when the first process group is made: a missing or mismatching build is reported there.
    """
    import torch.distributed as dist

    from ftcomm.torch import rendezvous

    if not dist.is_available() or "FTCOMM" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("ftcomm", _create, extended_api=True, devices=[*DEVICES])
    rendezvous.register()


def _create(dist_opts: Any, pg_options: Any) -> Any:
    from ftcomm.torch.groups import create

    return create(dist_opts, pg_options)
