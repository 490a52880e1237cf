"""Exact undo of DTensors: FSDP2 and HSDP, two processes; the other one need not be alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_the_local_shards_are_undone_though_the_other_rank_is_dead(tmp_path: Path) -> None:
    script = [sys.executable, "-W", "ignore", str(TESTS / "recovery" / "undo_shards.py")]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [*script, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"{rank}.err").open("w"),
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            assert process.stdout.readline() == "stepped\n", (tmp_path / f"{rank}.err").read_text()
        ranks[1].kill()
        ranks[1].wait()
        out, _ = ranks[0].communicate("dead\n", timeout=60)
        assert out == "undone\n", (tmp_path / "0.err").read_text()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
