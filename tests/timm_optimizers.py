"""timm's Lamb and Lars from their own files, which need torch only: ``import timm`` asks for torchvision, and for more."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["load"]


_FIRST = (1, 0, 31)  # with the settings that the tests draw


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", metadata.version("timm"))[:3])


def load(name: str) -> Any:
    """The class; None without timm 1.0.31. ``pip install --no-deps timm`` is enough."""
    module = f"timm.optim.{name.lower()}"
    if module in sys.modules or "timm" in sys.modules:
        return getattr(importlib.import_module(module), name)
    found = importlib.util.find_spec("timm")
    if found is None or not found.submodule_search_locations or _version() < _FIRST:
        return None
    folder = Path(next(iter(found.submodule_search_locations)))
    # Packages without the content of their __init__.py, for as long as the file is read: a later import of timm is the whole one.
    for package, path in (("timm", folder), ("timm.optim", folder / "optim")):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(path)]
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        del sys.modules["timm"], sys.modules["timm.optim"]
