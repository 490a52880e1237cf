"""Functions that run on each kind of device there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
from devices import DEVICES


class Place:
    """``place(fn)`` runs ``fn(device)``: here on the CPU, in a child on a GPU, as others will."""

    def __init__(self, device: str, ranks: harness.Ranks) -> None:
        self.device, self._ranks = device, ranks

    def __call__(self, fn: Callable[[str], Any]) -> None:
        if self.device == "cpu":
            fn("cpu")
        else:
            self._ranks(1, lambda group, context: fn(self.device), direct=False, deadline=120.0)


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest, ranks: harness.Ranks) -> Place:
    return Place(request.param, ranks)


@pytest.fixture
def on_gpu(gpu: str, ranks: harness.Ranks) -> Place:
    """Of tests that are about a GPU only."""
    return Place(gpu, ranks)
