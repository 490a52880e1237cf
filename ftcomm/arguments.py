"""Checks of numbers that go to C: what does not fit there is the caller's mistake, and is told as such."""

from __future__ import annotations

import operator
from typing import Any

from ftcomm.errors import ConfigError

__all__ = ["integer", "real", "seconds"]


def integer(name: str, value: Any, *, signed: bool = True) -> int:
    """``value`` as an integer of 64 bits; ConfigError unless it is one (of any library, or a truth value)."""
    least, most = (-(1 << 63), (1 << 63) - 1) if signed else (0, (1 << 64) - 1)
    try:
        # NumPy's truth values are no integers for Python, and what all ranks agree on is often one.
        found = operator.index(bool(value) if str(getattr(value, "dtype", "")) == "bool" else value)
    except (TypeError, ValueError):
        found = None
    if found is None or not least <= found <= most:
        bounds = "-2**63 to 2**63-1" if signed else "0 to 2**64-1"
        raise ConfigError(f"{name}={value!r} must be a whole number from {bounds}.")
    return found


def real(name: str, value: Any, what: str = "a number") -> float:
    """``value`` as a float; ConfigError unless it is a number (of any library)."""
    try:
        if not isinstance(value, (str, bytes, bytearray)):  # of which float() would read some
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"{name}={value!r} must be {what}.")


def seconds(name: str, value: Any) -> float:
    """``value`` as a float; ConfigError unless it is a positive number."""
    what = "a positive number of seconds"
    found = real(name, value, what)
    if not found > 0:
        raise ConfigError(f"{name}={value!r} must be {what}.")
    return found
