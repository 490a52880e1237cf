"""Loads libftcomm.so through cffi (ABI mode). The C header itself is the declaration: nothing is repeated here.

Importing this module loads nothing; :func:`lib` does so on first use and starts no thread.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ftcomm import errors

_FOLDER = "_native"
_cache: list[Any] = []


def native_path(name: str) -> str:
    """The path of a file that the build installed (``libftcomm.so``, ``ftcomm.h``, ``ftcomm-sim``)."""
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


def declarations(header: str) -> str:
    """What cffi can parse of the C header: no preprocessor lines, no comments, no export macro, no C++ guard."""
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\s*#.*$", " ", text, flags=re.MULTILINE)
    return re.sub(r"\bFT_API\b", " ", text)


def _load() -> tuple[Any, Any]:
    import cffi

    ffi = cffi.FFI()
    with open(native_path("ftcomm.h"), encoding="utf-8") as header:
        ffi.cdef(declarations(header.read()))
    return ffi, ffi.dlopen(native_path("libftcomm.so"))


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
