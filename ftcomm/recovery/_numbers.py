"""Checks of numbers that a user gives, and numbers as people read them."""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any

from ftcomm.errors import ConfigError


def number(name: str, value: Any, unit: str, *, zero: bool = False, infinite: bool = False) -> float:
    """``value`` as a float, NumPy's too; ConfigError unless it is a positive number (``zero``, ``infinite``: or that)."""
    found: float = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            found = value if isinstance(value, float) else float(value)
    if math.isnan(found) or found < 0 or (found == 0 and not zero) or (found == math.inf and not infinite):
        kind = "zero or a positive number" if zero else "a positive number"
        raise ConfigError(f"{name}={value!r} must be {kind} of {unit}{' (or math.inf)' if infinite else ''}.")
    return found


def count(name: str, value: Any, what: str, least: int = 1) -> int:
    """``value`` as an int, NumPy's too; ConfigError unless it is a whole number of at least ``least``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of {what}, at least {least}.")
    return int(value)


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
