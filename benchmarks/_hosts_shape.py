"""What a line between two hosts is like, and how a command line says it."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_UNITS = {"g": 1e9, "m": 1e6, "k": 1e3, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Shape:
    rate: float  # bits a second, 0: as fast as it goes
    delay: float  # seconds in each direction

    def __str__(self) -> str:
        rate = f"{self.rate / 1e9:g} Gbit/s" if self.rate else "no limit"
        return f"{rate}, {1e3 * self.delay:g} ms each way"


def rate(text: str) -> float:
    """Bits a second; 0: no limit."""
    text = text.strip().lower()
    return 0.0 if text in ("none", "0") else _quantity(text, "gmk", "write none, 5G or 100M")


def delay(text: str) -> float:
    """Seconds each way."""
    text = text.strip().lower()
    return 0.0 if text == "0" else _quantity(text, ("us", "ms", "s"), "write 0, 100us, 1ms or 1s")


def several(of: Callable[[str], float]) -> Callable[[str], list[float]]:
    """What reads such quantities with commas between them."""

    def read(text: str) -> list[float]:
        return [of(part) for part in text.split(",")]

    return read


def _quantity(text: str, units: Iterable[str], allowed: str) -> float:
    for unit in units:
        with contextlib.suppress(ValueError):
            if text.endswith(unit) and 0 < (number := float(text.removesuffix(unit))) < float("inf"):
                return number * _UNITS[unit]
    raise argparse.ArgumentTypeError(f"{text!r}: {allowed}")
