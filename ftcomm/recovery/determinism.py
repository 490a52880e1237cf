"""The same bits again: seeds, the state of random generators, and torch's deterministic algorithms.

Replay needs computation that gives the same output for the same input (SWIFT, sections 5.1 and 6). Importing this module
imports neither NumPy nor torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ftcomm.errors import ConfigError, Unsupported

__all__ = ["RngState", "capture_rng", "deterministic", "restore_rng", "seed_everything"]

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")


@dataclass(frozen=True)
class RngState:
    """Where the random generators of a process stand; made by :func:`capture_rng`. Picklable, and equal if they stand alike.

    Attributes:
        python: of :mod:`random`.
        numpy: of ``numpy.random``'s global generator; None if NumPy was not imported.
        torch: of torch's CPU generator; None if torch was not imported.
        cuda: of each CUDA device's generator; None if CUDA was not in use.
    """

    python: tuple[Any, ...]
    numpy: tuple[str, bytes, int, int, float] | None = None
    torch: bytes | None = None
    cuda: tuple[bytes, ...] | None = None


def seed_everything(seed: int, deterministic: bool = True) -> None:
    """Seeds the generators of Python, NumPy and, if it is installed, torch (CPU and all CUDA devices).

    NumPy and torch are imported for that. Generators made by hand (``numpy.random.default_rng()``, ``torch.Generator()``) are not
    reached, nor is ``PYTHONHASHSEED``.

    Args:
        seed: 0 to 2**32-1. Ranks that should draw differently need different ones, e.g. ``seed + rank``.
        deterministic: also switches torch's deterministic algorithms on, for good; see :func:`deterministic`. Call it before the
            first CUDA operation then.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 32:
        raise ConfigError(f"seed={seed!r} must be a whole number from 0 to {(1 << 32) - 1}, which is what NumPy takes.")
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch = _torch()
    if torch is not None:
        torch.manual_seed(seed)  # CUDA devices, too, at once or when CUDA is first used
    if deterministic:
        _Settings.now(torch).switched_on().apply(torch)


def capture_rng() -> RngState:
    """Where the generators stand now. Of NumPy and torch only if they are imported, of CUDA only if it is in use."""
    numpy_state = torch_state = cuda = None
    if (np := sys.modules.get("numpy")) is not None:
        found = np.random.get_state(legacy=False)
        if found["bit_generator"] != "MT19937":
            raise Unsupported(
                f"numpy.random's global generator was replaced by {found['bit_generator']}; capture_rng() knows MT19937 only. "
                "Leave the global one as it is and save your own generators yourself."
            )
        state = found["state"]
        numpy_state = (
            "MT19937",
            state["key"].tobytes(),
            int(state["pos"]),
            int(found["has_gauss"]),
            float(found["gauss"]),
        )
    if (torch := sys.modules.get("torch")) is not None:
        torch_state = _bytes(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            cuda = tuple(_bytes(state) for state in torch.cuda.get_rng_state_all())
    return RngState(random.getstate(), numpy_state, torch_state, cuda)


def restore_rng(state: RngState) -> None:
    """Puts the generators back; those that ``state`` says nothing about are left alone.

    Raises:
        ConfigError: ``state`` is of more CUDA devices than there are here, or is no :class:`RngState`. Nothing was changed.
    """
    if not isinstance(state, RngState):
        raise ConfigError(f"restore_rng() takes what capture_rng() returned, not {type(state).__name__}.")
    torch = None
    if state.torch is not None or state.cuda is not None:
        torch = _torch()
        if torch is None:
            raise ConfigError("The state has torch's generators, but torch is not installed here. Install it.")
    if state.cuda is not None and torch is not None:
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices < len(state.cuda):
            raise ConfigError(
                f"The state is of {len(state.cuda)} CUDA devices, and here are {devices}. Restore it on a machine with as many, "
                "or set CUDA_VISIBLE_DEVICES alike."
            )
    random.setstate(state.python)
    if state.numpy is not None:
        import numpy as np

        name, key, position, has_gauss, gauss = state.numpy
        np.random.set_state((name, np.frombuffer(key, np.uint32), position, has_gauss, gauss))
    if state.torch is not None and torch is not None:
        torch.set_rng_state(_tensor(torch, state.torch))
    for device, one in enumerate(state.cuda or ()):
        if torch is not None:
            torch.cuda.set_rng_state(_tensor(torch, one), device)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Within it torch takes deterministic algorithms only; afterwards everything is as before.

    Switched are ``torch.use_deterministic_algorithms`` (an operation that has none raises then), cuDNN's ``deterministic`` and
    ``benchmark``, and ``CUBLAS_WORKSPACE_CONFIG``, which CUDA reads when cuBLAS is first used: enter it before. The settings are
    of the whole process, threads included. Without torch only the variable is set. Also a decorator.
    """
    torch = _torch()
    before = _Settings.now(torch)
    before.switched_on().apply(torch)
    try:
        yield
    finally:
        before.apply(torch)


@dataclass(frozen=True)
class _Settings:
    workspace: str | None
    algorithms: bool = False
    warn_only: bool = False
    cudnn_deterministic: bool = False
    cudnn_benchmark: bool = False

    @staticmethod
    def now(torch: Any) -> _Settings:
        workspace = os.environ.get(CUBLAS)
        if torch is None:
            return _Settings(workspace)
        return _Settings(
            workspace,
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    def switched_on(self) -> _Settings:
        workspace = self.workspace if self.workspace in CUBLAS_DETERMINISTIC else CUBLAS_DETERMINISTIC[0]
        return _Settings(workspace, algorithms=True, cudnn_deterministic=True)

    def apply(self, torch: Any) -> None:
        if self.workspace is None:
            os.environ.pop(CUBLAS, None)
        else:
            os.environ[CUBLAS] = self.workspace
        if torch is not None:
            torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warn_only)
            torch.backends.cudnn.deterministic = self.cudnn_deterministic
            torch.backends.cudnn.benchmark = self.cudnn_benchmark


def _torch() -> Any:
    """The torch module, imported if need be; None if it is not installed."""
    if sys.modules.get("torch") is None and importlib.util.find_spec("torch") is None:
        return None
    return importlib.import_module("torch")


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.cpu().numpy())


def _tensor(torch: Any, state: bytes) -> Any:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
