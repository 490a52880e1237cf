"""The harness itself."""

import gc
from typing import Any

import pytest
from harness import Ranks

import ftcomm


def test_a_rank_does_not_collect_the_garbage_of_its_parent(ranks: Ranks) -> None:
    """A hosted torch store ends with a join of its thread, which a forked child has not: the collector would hang."""
    distributed = pytest.importorskip("torch.distributed")

    def run(comm: ftcomm.Communicator) -> Any:
        gc.collect()
        return comm.rank

    cycle: list[Any] = [distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert ranks(2, run) == [0, 1]
    finally:
        gc.enable()
        gc.collect()
