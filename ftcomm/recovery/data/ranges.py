"""Positions of an epoch's order as ranges ``(start, stop)``: a slice of a million samples is two numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Range", "count", "cut", "deal", "merged"]

Range = tuple[int, int]


def count(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same positions in order, neighbours put together, nothing empty."""
    out: list[Range] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def cut(ranges: list[Range], size: int) -> tuple[list[Range], list[Range]]:
    """The first ``size`` positions, and the others."""
    first: list[Range] = []
    for i, (start, stop) in enumerate(ranges):
        middle = min(stop, start + size)
        if middle > start:
            first.append((start, middle))
        size -= middle - start
        if middle < stop:
            return first, [(middle, stop), *ranges[i + 1 :]]
    return first, []


def deal(ranges: list[Range], loads: Mapping[int, int]) -> dict[int, list[Range]]:
    """Shares the positions out so that loads which differ by one at most still do so afterwards.

    Args:
        loads: slot -> how many it has already. The slots with the fewest come first, then those with the lowest number.
    """
    total, slots = count(ranges), sorted(loads, key=lambda slot: (loads[slot], slot))
    out: dict[int, list[Range]] = {}
    for i, slot in enumerate(slots):
        out[slot], ranges = cut(ranges, total // len(slots) + (i < total % len(slots)))
    return out
