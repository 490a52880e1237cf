"""Policy replay, with ranks that share the processors of one host: sums by windows have the bits of those without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import programs
import pytest
from keeper import Keeper, faults
from kill_table import points
from processors import on_one_processor

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")


@pytest.fixture(params=["1"])
def wanted(request: pytest.FixtureRequest, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Of four ranks without windows; from here on there are some."""
    monkeypatch.setenv("FTCOMM_PEER_MEMORY", request.param)
    values = undisturbed(4, programs.everything, "shm")
    monkeypatch.setenv("FTCOMM_STAGE_LIMIT", "0")
    with on_one_processor():
        yield values


@pytest.mark.parametrize("wanted", ["0", "1"], indirect=True)
def test_nobody_dies(keep: Keep, wanted: list[Any]) -> None:
    assert keep(4, programs.everything, transport="shm").values() == wanted


@pytest.mark.parametrize(
    "point", [*(f"{point}:{nth}" for point in points("stage.") for nth in (1, 23)), "share.put:7", "result.after:9"]
)
@pytest.mark.sample(4)
def test_a_death(keep: Keep, wanted: list[Any], point: str) -> None:
    job = keep(4, programs.everything, transport="shm", faults=faults({1}, point), heartbeat=2.0)
    assert job.values() == wanted
    assert job.deaths == [(1, 0)]


@pytest.mark.parametrize("wanted", ["0", "1"], indirect=True)
@pytest.mark.parametrize("victims", [{0, 1}, {0, 1, 2, 3}])
@pytest.mark.sample(2)
def test_deaths(keep: Keep, wanted: list[Any], victims: set[int]) -> None:
    """A pair; and all, whose next generation begins with the logs."""
    job = keep(4, programs.everything, transport="shm", faults=faults(victims, "stage.final:12"), heartbeat=2.0)
    assert job.values() == wanted
    assert job.deaths


@pytest.mark.parametrize("wanted", ["0", "1"], indirect=True)
@pytest.mark.parametrize(("windowless", "victim"), [({2}, 1), ({0, 1, 2, 3}, 0)])
@pytest.mark.sample(2)
def test_no_room_for_windows(keep: Keep, wanted: list[Any], windowless: set[int], victim: int) -> None:
    """One vote, and what runs in their place gives the same. A replacement does not know of it, and hears, or finds it out.
    (The first one made is a board, without which small inputs are sent.)"""
    refused = ";".join(f"rank={rank},at=shm.window:2,do=corrupt" for rank in windowless)
    job = keep(
        4, programs.everything, transport="shm", faults=f"{refused};{faults({victim}, 'repair.start')}", heartbeat=2.0
    )
    assert job.values() == wanted
    assert job.deaths == [(victim, 0)]


def test_the_next_generation_has_no_windows(keep: Keep, wanted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on another machine. What is done again from the inputs gives the same there."""
    job = keep(4, programs.everything, transport="shm")
    job.run_until(lambda: all(job.marked(rank, "running") for rank in range(4)))
    for victim in range(4):
        job.kill(victim)
    monkeypatch.setenv("FTCOMM_STAGE_LIMIT", str(1 << 40))
    assert job.values() == wanted
    assert job.generation == 1
