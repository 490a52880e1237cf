"""What a replacement could not follow is refused at once, on the ranks that live, and not when somebody has died."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch_store as torch_store_process

import ftcomm


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


def test_a_second_job_after_the_first(keep: Callable[..., Any], tmp_path: Path) -> None:
    def program(comm: Any, context: harness.Context) -> list[bool]:
        others = ftcomm.Options(policy="raise"), ftcomm.Options(policy="replay", log_dir=str(tmp_path / "log"))
        comm.leave()
        with pytest.raises(ftcomm.ConfigError, match="Keep one job"):
            ftcomm.init(comm.rank, comm.size, f"file://{tmp_path}/replay", others[1], job="second")
        ftcomm.init(comm.rank, comm.size, f"file://{tmp_path}/raise", others[0], job="third").leave()
        return [True]

    assert keep(2, program).values() == [[True]] * 2


def test_the_gloo_groups_of_debug_level_detail(ranks: harness.Ranks, torch_store: tuple[str, int]) -> None:
    dist = pytest.importorskip("torch.distributed")
    from torch_keeper import TorchKeeper

    def program(context: harness.Context) -> bool:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        with pytest.raises(ftcomm.ConfigError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
            dist.new_group([0, 1])
        dist.set_debug_level(dist.DebugLevel.OFF)
        return True

    assert TorchKeeper(ranks, torch_store, 2, program).values() == [True, True]


def test_a_join_point(ranks: harness.Ranks, torch_store: tuple[str, int]) -> None:
    torch = pytest.importorskip("torch")
    from torch_keeper import TorchKeeper

    def program(context: harness.Context) -> bool:
        with pytest.raises(ftcomm.Unsupported, match="not for the policy replay: .* `ftrun --policy lossy`"):
            ftcomm.torch.join_point(torch.nn.Linear(2, 2))
        return True

    assert TorchKeeper(ranks, torch_store, 2, program).values() == [True, True]
