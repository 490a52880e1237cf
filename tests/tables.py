"""Which cases of a table ``make test`` runs."""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterable
from typing import Any

import pytest


def most(cases: list[Any], rest: Iterable[Any]) -> list[Any]:
    """``cases`` always; those of ``rest`` in the long tables (``make tables``). One of several parameters is a tuple."""
    later = [case if isinstance(case, tuple) else (case,) for case in rest if case not in cases]
    return [*cases, *(pytest.param(*case, marks=pytest.mark.table) for case in later)]


def leave_samples(items: list[pytest.Item]) -> None:
    """Of a test with the marker ``sample(n)`` all cells but n go to the long tables: of products of parameters, where each cell
    is as good as another. The same ones in each run, with as many values of each parameter as so few can have."""
    cells: dict[tuple[str, int], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if (sample := item.get_closest_marker("sample")) and not item.get_closest_marker("table"):
            cells[item.nodeid.partition("[")[0], sample.args[0]].append(item)
    for (_, number), some in cells.items():
        left = sorted(some, key=lambda item: zlib.crc32(item.nodeid.encode()))
        seen: set[tuple[str, str]] = set()
        for _ in range(min(number, len(left))):
            new = max(left, key=lambda item: len(_values(item) - seen))  # the first of the best
            left.remove(new)
            seen |= _values(new)
        for item in left:
            item.add_marker(pytest.mark.table)


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    return {(name, str(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
