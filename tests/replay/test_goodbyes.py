"""The last word of a rank that leaves: a launcher that has read it has read all else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

import ftcomm
from ftcomm.launch.folder import read_events


def test_a_goodbye_comes_after_all_other_events(keep: Callable[..., Any], tmp_path: Path) -> None:
    """The native side's are told a little later, as whoever listens would be in the way of a recovery."""

    def program(comm: Any, context: harness.Context) -> bool:
        with pytest.raises(ftcomm.Mismatch):
            comm.all_reduce(np.zeros(comm.rank + 1))
        comm.leave()
        return True

    assert keep(2, program, events=str(tmp_path)).values() == [True] * 2
    told = [event["event"] for event in read_events(tmp_path / "events-0-0.jsonl")]
    assert "failed" in told
    assert told[-1] == "goodbye"
