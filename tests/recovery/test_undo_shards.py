"""Exact undo of DTensors: FSDP2 and HSDP, two processes; the other one need not be alive."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest

torch = pytest.importorskip("torch")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_the_local_shards_are_undone_though_the_other_rank_is_dead(ranks: harness.Ranks, tmp_path: Path) -> None:
    from recovery import undo_shards

    group = ranks.start(2, lambda group, context: undo_shards.run(context, tmp_path / "store"), direct=False)
    for rank in range(2):
        group.wait_for(rank, "stepped")
    group.kill(1)
    group.wait_ended(1)
    group.release(0)
    assert ranks.values(group, dies=(1,))[0] == "undone"
