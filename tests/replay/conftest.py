"""Fixtures for the tests of replay; keeper.py keeps a job alive, programs.py is what its ranks do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import harness
import keeper
import pytest

Reference = Callable[..., list[Any]]


@pytest.fixture
def keep(ranks: harness.Ranks) -> Iterator[Callable[..., keeper.Keeper]]:
    """Makes a Keeper; what is left of it goes after the test."""
    made: list[keeper.Keeper] = []

    def make(size: int, program: Any, **options: Any) -> keeper.Keeper:
        made.append(keeper.Keeper(ranks, size, program, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


_known: dict[tuple[Any, ...], list[Any]] = {}


@pytest.fixture
def undisturbed(keep: Callable[..., keeper.Keeper], pulls: None) -> Reference:
    """What the ranks of an undisturbed run return."""

    def run(size: int, program: Any, transport: str) -> list[Any]:
        # Options of ranks, such as the degree of their trees, may decide on the order of a sum.
        key = (
            size,
            program.__name__,
            transport,
            tuple(sorted(kv for kv in os.environ.items() if kv[0].startswith("FTCOMM_"))),
        )
        if key not in _known:
            _known[key] = keep(size, program, transport=transport).values()
        return _known[key]

    return run
