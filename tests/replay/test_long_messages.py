"""Policy replay between hosts: long messages, which go in many pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Context
from keeper import Keeper

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")
BYTES = (3 << 20) + 5


@pytest.mark.parametrize("point", ["log.payload.after:2", "log.header.before:2"])
def test_its_sender_dies_before_it_is_logged(keep: Keep, point: str) -> None:
    """What its replacement sends is what arrives, and may be something else: the first one was never a message."""

    def run(comm: Any, context: Context) -> list[int]:
        x, first = np.full(BYTES, 1 + context.incarnation, np.uint8), np.zeros(1)
        if comm.rank == 0:
            comm.ft_send(first, 1)
            comm.ft_recv(first, 1)  # it has asked for what comes
            comm.ft_send(x, 1)
        else:
            comm.ft_recv(first, 0)
            comm.ft_send(first, 0)
            comm.ft_recv(x, 0)
        return np.unique(x).tolist()

    job = keep(2, run, transport="tcp", faults=f"rank=0.0,at={point},do=kill")
    assert job.values() == [[2], [2]]
    assert job.deaths == [(0, 0)]


@pytest.mark.parametrize("victims", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("nth", [3, 30, 60])
@pytest.mark.sample(3)
def test_either_side_dies_on_its_way(keep: Keep, victims: set[int], nth: int) -> None:
    def run(comm: Any, context: Context) -> int:
        x, total = np.zeros(BYTES, np.uint8), 0
        for step in range(6):
            if comm.rank == 0:
                x[:] = np.arange(BYTES) % 251 + step % 4
                comm.ft_send(x, 1)
            else:
                comm.ft_recv(x, 0)
            total = total * 31 % 1_000_003 + int(x.sum(dtype=np.int64))
        return total

    wanted = keep(2, run, transport="tcp").values()
    assert wanted[0] == wanted[1]
    points = {0: "channel.piece", 1: "tcp.receive"}
    faults = ";".join(f"rank={victim}.0,at={points[victim]}:{nth},do=kill" for victim in victims)
    job = keep(2, run, transport="tcp", faults=faults)
    assert job.values() == wanted
    assert {rank for rank, _ in job.deaths} == victims
