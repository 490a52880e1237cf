"""The fixture ``network``: several hosts on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import harness
import network as net
import pytest


@pytest.fixture(scope="session")
def _possible() -> None:
    harness.load()
    reason = net.why_not()
    if reason is not None:
        pytest.skip(f"several hosts on one machine: {reason}")


@pytest.fixture
def network(_possible: None) -> Iterator[Callable[..., net.Network]]:
    """``network(2)`` makes two hosts, which go with the test."""
    made: list[net.Network] = []

    def make(hosts: int, ipv4: bool = True) -> net.Network:
        made.append(net.Network(hosts, ipv4))
        return made[-1]

    yield make
    for one in made:
        one.close()
