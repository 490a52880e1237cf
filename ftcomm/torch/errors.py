"""The exception that torch programs see."""

from __future__ import annotations

import sys

import torch.distributed as dist

from ftcomm import errors
from ftcomm.exit_code import end_with_group

__all__ = ["BackendError"]


class BackendError(dist.DistBackendError):  # type: ignore[misc]
    """A failed operation of a process group; ``__cause__`` is the :class:`ftcomm.Error` with ranks, evidence, epoch.

    Made by torch's C++ code, which knows only the text; the rest was left aside for this thread.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        extension = sys.modules.get("_ftcomm_torch")
        detail = extension.take_detail() if extension is not None else None
        if detail is not None:
            cause = errors.from_json(*detail)
            end_with_group(cause)
            self.__cause__ = cause
