"""A process that dies before it has a log: nothing is lost with it, so nobody is asked for what was never there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs
import pytest
from keeper import Keeper
from tables import most

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")


@pytest.mark.parametrize("transport", most(["shm", "hosts"], ["tcp"]))
def test_a_founder_dies_before_anybody_has_a_log(keep: Keep, undisturbed: Any, transport: str) -> None:
    """With it the start fails on all. The next generation's processes are nobody's first, and there is no log to be found."""
    wanted = undisturbed(3, programs.everything, transport)
    job = keep(3, programs.everything, transport=transport, faults="rank=1.0,at=start.link,do=kill")
    job.run_until(lambda: job.marked(1, "running"))
    assert job.generation > 0
    job.kill(1)  # whose log is like any other
    assert job.values() == wanted


@pytest.mark.parametrize("transport", most(["shm", "tcp"], ["hosts"]))
def test_two_die_before_they_are_known(keep: Keep, undisturbed: Any, transport: str) -> None:
    """Their replacements found the job in their places, each without a log of its predecessor."""
    wanted = undisturbed(3, programs.everything, transport)
    faults = ";".join(f"rank={rank}.0,at=rendezvous.publish,do=kill" for rank in (0, 1))
    job = keep(3, programs.everything, transport=transport, faults=faults)
    assert job.values() == wanted
    assert job.generation == 0
    job.died_only((0, 0), (1, 0))


def test_a_founder_of_a_log_group_dies_before_anybody_has_a_log(keep: Keep, undisturbed: Any) -> None:
    wanted = undisturbed(4, programs.everything, "shm")
    faults = "rank=1.0,at=start.link,do=kill"
    job = keep(4, programs.everything, transport="shm", log=[[0, 1], [2, 3]], faults=faults)
    assert job.values() == wanted
    assert job.generation > 0
