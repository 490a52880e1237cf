"""Loads libftcomm.so through cffi (out-of-line ABI mode: scripts/make_abi.py turns the C header into a module at build time).

Importing this module loads nothing; :func:`lib` does so on first use and starts no thread.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from ftcomm import errors

_FOLDER = "_native"
_cache: list[Any] = []


def native_path(name: str) -> str:
    """The path of a file that the build installed (``libftcomm.so``, ``abi.py``, ``ftcomm-sim``)."""
    import ftcomm

    tried = []
    for folder in ftcomm.__path__:  # two folders in an editable install: the source tree and site-packages
        path = os.path.join(folder, _FOLDER, name)
        if os.path.exists(path):
            return path
        tried.append(path)
    raise errors.ConfigError(
        f"ftcomm's {name} was not found (looked for {', '.join(tried)}). This looks like a source tree that was not "
        "built: run `make setup` there, or install the package with pip and start Python from another folder."
    )


def library_path() -> str:
    """The libftcomm.so of this process; FTCOMM_LIBRARY names one of another build of the same source."""
    return os.environ.get("FTCOMM_LIBRARY") or native_path("libftcomm.so")


def _load() -> tuple[Any, Any]:
    spec = importlib.util.spec_from_file_location("ftcomm._native.abi", native_path("abi.py"))
    assert spec is not None
    assert spec.loader is not None
    abi = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(abi)
    ffi = abi.ffi
    C = ffi.dlopen(library_path())
    for name in dir(C):
        getattr(C, name)  # found and bound now, not in the middle of a recovery
    return ffi, C


def lib() -> tuple[Any, Any]:
    """``(ffi, C)``: the cffi object and the library, loaded once per process."""
    if not _cache:
        _cache.append(_load())
    return _cache[0]  # type: ignore[no-any-return]


def last_error(code: int) -> errors.Error:
    """The exception for a code that a C function has just returned on this thread."""
    ffi, C = lib()
    return errors.from_json(code, ffi.string(C.ft_last_error()).decode("utf-8", "replace"))


def check(code: int) -> None:
    """Raises the exception for ``code`` unless it is FT_OK."""
    if code != 0:
        raise last_error(code)
