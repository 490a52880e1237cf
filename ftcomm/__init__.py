"""ftcomm: collective communication in which the death of a process is an ordinary event.

>>> import ftcomm                                   # no thread, no descriptor, no torch, no NumPy
>>> comm = ftcomm.init()                            # under ftrun, mpirun or with env://
>>> comm.all_reduce(array, "sum")                   # NumPy arrays, torch CPU tensors, the buffer protocol

With torch: ``torch.distributed.init_process_group("ftcomm")``; this package need not be imported for it.
Everything is loaded on first use, so that importing torch (which looks at this package) costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ftcomm.api": (
        "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "barrier", "broadcast",
        "default_communicator", "ft_all_reduce", "ft_recv", "ft_send", "gather", "get_rank", "get_world_size", "init",
        "irecv", "is_initialized", "isend", "leave", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
        "send",
    ),
    "ftcomm.communicator": ("Communicator",),
    "ftcomm.errors": (
        "Cancelled", "Closed", "ConfigError", "Error", "InternalError", "Interrupted", "LogCorrupt", "LogFull", "Mismatch",
        "NoAuthority", "PeerFailure", "ReplayDiverged", "Revoked", "StaleEpoch", "SystemFailure", "Timeout", "Truncated",
        "Unsupported",
    ),
    "ftcomm.job": ("Job",),
    "ftcomm.options": ("Options",),
    "ftcomm.point_to_point": ("ANY",),
    "ftcomm.request": ("Outcome", "Request", "wait_all"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBMODULES = ("torch", "launch", "stores", "errors", "rendezvous", "recovery")

__all__ = [*_HOME_OF, "__version__"]  # noqa: PLE0604 - names of the table above

if TYPE_CHECKING:
    from ftcomm import recovery as recovery
    from ftcomm import torch as torch
    from ftcomm.api import all_gather as all_gather
    from ftcomm.api import all_gather_into_tensor as all_gather_into_tensor
    from ftcomm.api import all_reduce as all_reduce
    from ftcomm.api import all_to_all_single as all_to_all_single
    from ftcomm.api import barrier as barrier
    from ftcomm.api import broadcast as broadcast
    from ftcomm.api import default_communicator as default_communicator
    from ftcomm.api import ft_all_reduce as ft_all_reduce
    from ftcomm.api import ft_recv as ft_recv
    from ftcomm.api import ft_send as ft_send
    from ftcomm.api import gather as gather
    from ftcomm.api import get_rank as get_rank
    from ftcomm.api import get_world_size as get_world_size
    from ftcomm.api import init as init
    from ftcomm.api import irecv as irecv
    from ftcomm.api import is_initialized as is_initialized
    from ftcomm.api import isend as isend
    from ftcomm.api import leave as leave
    from ftcomm.api import recv as recv
    from ftcomm.api import reduce as reduce
    from ftcomm.api import reduce_scatter as reduce_scatter
    from ftcomm.api import reduce_scatter_tensor as reduce_scatter_tensor
    from ftcomm.api import scatter as scatter
    from ftcomm.api import send as send
    from ftcomm.communicator import Communicator as Communicator
    from ftcomm.errors import Cancelled as Cancelled
    from ftcomm.errors import Closed as Closed
    from ftcomm.errors import ConfigError as ConfigError
    from ftcomm.errors import Error as Error
    from ftcomm.errors import InternalError as InternalError
    from ftcomm.errors import Interrupted as Interrupted
    from ftcomm.errors import LogCorrupt as LogCorrupt
    from ftcomm.errors import LogFull as LogFull
    from ftcomm.errors import Mismatch as Mismatch
    from ftcomm.errors import NoAuthority as NoAuthority
    from ftcomm.errors import PeerFailure as PeerFailure
    from ftcomm.errors import ReplayDiverged as ReplayDiverged
    from ftcomm.errors import Revoked as Revoked
    from ftcomm.errors import StaleEpoch as StaleEpoch
    from ftcomm.errors import SystemFailure as SystemFailure
    from ftcomm.errors import Timeout as Timeout
    from ftcomm.errors import Truncated as Truncated
    from ftcomm.errors import Unsupported as Unsupported
    from ftcomm.job import Job as Job
    from ftcomm.options import Options as Options
    from ftcomm.point_to_point import ANY as ANY
    from ftcomm.request import Outcome as Outcome
    from ftcomm.request import Request as Request
    from ftcomm.request import wait_all as wait_all


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_SUBMODULES})
