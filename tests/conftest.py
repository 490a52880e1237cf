"""Fixtures for all tests; the harness is in harness.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> None:
    for name in [name for name in os.environ if name.startswith("FTCOMM_") and name != "FTCOMM_SOAK_KILLS"]:
        del os.environ[name]


@pytest.fixture(scope="session")
def store_address() -> Iterator[tuple[str, int]]:
    """A store that outlives every rank, in a process of its own."""
    harness.load()
    process = harness.StoreProcess()
    yield process.address
    process.close()


@pytest.fixture
def ranks(store_address: tuple[str, int], tmp_path: Path) -> Iterator[harness.Ranks]:
    """Runs functions as ranks: see harness.Ranks."""
    made = harness.Ranks(store_address, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Runs the test over shared memory and over sockets."""
    return str(request.param)
