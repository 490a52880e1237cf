"""Loads the compiled part, if it was built for this torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from typing import Any

from ftcomm._lib import lib, native_path
from ftcomm.errors import ConfigError

__all__ = ["load"]

_NAME = "_ftcomm_torch"
_REBUILD = (
    "python -m pip install --no-build-isolation --force-reinstall --no-deps /path/to/the/source/of/ftcomm "
    "(in an environment that `make setup` made: make setup TORCH=<the version that is installed>)"
)


def load() -> Any:
    """The module ``_ftcomm_torch``.

    Raises:
        ConfigError: there is none, or it was built for another torch: c10d has no stable binary interface.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    import torch
    import torch.distributed

    try:
        with open(native_path("torch_version.txt"), encoding="utf-8") as file:
            built = file.read().strip()
        path = native_path(_NAME + importlib.machinery.EXTENSION_SUFFIXES[0])
    except ConfigError:
        raise ConfigError(
            "ftcomm was installed without its torch backend, because torch could not be imported when it was built. "
            f"Install torch first, then build ftcomm again: {_REBUILD}"
        ) from None
    if built != torch.__version__:
        raise ConfigError(
            f"ftcomm's torch backend was built for torch {built}, but torch {torch.__version__} is running. "
            f"Build it again for this torch: {_REBUILD}"
        )
    lib()  # the one libftcomm.so of this process; the extension is linked to the same file
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module

    from ftcomm.torch.errors import BackendError

    module.set_error_class(BackendError)
    return module
