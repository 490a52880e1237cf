"""The compiled calls of a communicator, which are most of what its waiting operations need: bindings/python.

They take arrays and tensors of types that were seen before. Where anything is unusual, they call the function in whose place they
are, with nothing begun: it goes the long way, by a request, and has words for all that can be wrong.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from typing import Any

from ftcomm._lib import lib, native_path
from ftcomm.dtypes import OP_NUMBERS
from ftcomm.errors import ConfigError

__all__ = ["calls", "gate", "introduce"]

_NAME = "_ftcomm_calls"


@functools.cache
def _module() -> Any:
    ffi, _ = lib()  # the one libftcomm.so of this process; the extension is linked to the same file
    from ftcomm.collectives import ALGORITHMS, Collectives
    from ftcomm.point_to_point import PointToPoint

    spec = importlib.util.spec_from_file_location(_NAME, native_path(_NAME + importlib.machinery.EXTENSION_SUFFIXES[0]))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.configure(OP_NUMBERS, ALGORITHMS, functools.partial(ffi.cast, "ft_request*"))
    for name in module.METHODS:
        owner = PointToPoint if hasattr(PointToPoint, name) else Collectives
        function = getattr(owner, name)
        setattr(owner, name, functools.update_wrapper(module.Method(function), function))
    return module


def gate(address: int) -> Any:
    """Of a job's handle, or of none (0). After ``close()`` no call gets through."""
    return _module().Gate(address)


def calls(job: Any, id: int, name: str, rank: int, size: int, *, closed: bool = False) -> Any:
    """What the compiled methods have to know of the communicator ``id``."""
    from ftcomm.request import Request, as_usual, finish_now, orphans

    everyone = tuple(range(size))
    return _module().Calls(
        gate(0) if closed else job.gate,
        id,
        rank,
        size,
        job.options.heartbeat,
        name,
        functools.partial(Request, job, size, None, ""),
        finish_now,
        functools.partial(as_usual, everyone),
        orphans,
    )


_introduced: set[type] = set()


def introduce(kind: type) -> None:
    """A thing of this type comes the long way: the next ones need not, if they are arrays or tensors."""
    if kind in _introduced:
        return
    _introduced.add(kind)
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    if numpy is not None and kind is numpy.ndarray:
        from ftcomm.buffers import ARRAY_TYPES

        _module().arrays(kind, ARRAY_TYPES)
    elif torch is not None and kind is torch.Tensor:
        from ftcomm.torch._extension import load

        try:
            _module().tensors(load().tensor_view)
        except ConfigError:
            return  # built without torch, or for another one
