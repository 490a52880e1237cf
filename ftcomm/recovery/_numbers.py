"""Checks of numbers that a user gives, and numbers as people read them."""

from __future__ import annotations

import math
from typing import Any

from ftcomm.errors import ConfigError


def number(name: str, value: Any, unit: str, *, zero: bool = False, infinite: bool = False) -> None:
    """ConfigError unless it is a positive number (``zero``, ``infinite``: or that)."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or math.isnan(value) or value < 0 or (value == 0 and not zero) or (value == math.inf and not infinite):
        kind = "zero or a positive number" if zero else "a positive number"
        raise ConfigError(f"{name}={value!r} must be {kind} of {unit}{' (or math.inf)' if infinite else ''}.")


def count(name: str, value: Any, what: str, least: int = 1) -> None:
    """ConfigError unless it is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of {what}, at least {least}.")


def in_bytes(size: float) -> str:
    """``1.5e9`` -> ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} PB"


def in_seconds(seconds: float) -> str:
    """``0.0015`` -> ``1.5 ms``."""
    return f"{seconds:.4g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.4g} ms"
