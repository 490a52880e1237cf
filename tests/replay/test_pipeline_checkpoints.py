"""A pipeline with checkpoints: a killed stage loads the last one, and does again only what came after it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch_store as torch_store_process

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from test_lost_logs import another_host  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from torch_keeper import TorchKeeper  # noqa: E402

import ftcomm.torch  # noqa: E402

STAGES, WIDTH, STEPS, EVERY = 4, 24, 14, 4


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


def training(folder: Path, *dies: tuple[int, int]) -> Callable[[harness.Context], str]:
    """The digest of the weights at the end. ``dies``: ranks, and the step after which each is killed once."""

    def run(context: harness.Context) -> str:
        torch.use_deterministic_algorithms(True)
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
        stage = pipelining.PipelineStage(layers, rank, size, torch.device("cpu"))
        pipeline = pipelining.Schedule1F1B(stage, 2 * size, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2)

        def step(number: int) -> None:
            inputs = torch.randn(4 * size, WIDTH, generator=torch.Generator().manual_seed(number))
            more = {"target": inputs.sin()} if rank == size - 1 else {}
            pipeline.step(*([inputs] if rank == 0 else []), **more)
            optimizer.step()
            optimizer.zero_grad()

        def load(tag: Any) -> Any:
            state = torch.load(folder / f"{rank}-{tag}")
            layers.load_state_dict(state["layers"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            return state

        step(0)  # in its first step a schedule tells shapes around, which each process does again
        comm = ftcomm.torch.communicator()
        at, _ = comm.resume_from(load)
        context.mark("from", at)
        for number in range(int(at or 1), STEPS):
            step(number)
            if number % EVERY == EVERY - 1:
                state = {"layers": layers.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "random": torch.get_rng_state()}, folder / f"{rank}-{number + 1}")
                comm.commit_checkpoint(number + 1)
            context.mark("step", number)
            died = folder / f"{rank}-died"
            if (rank, number) in dies and not died.exists():
                died.touch()
                context.die()
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in layers.parameters())).hexdigest()

    return run


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param({1}, id="middle"),
        pytest.param({0, STAGES - 1}, id="ends", marks=pytest.mark.table),
        pytest.param(set(range(STAGES)), id="all", marks=pytest.mark.table),
    ],
)
def test_killed_stages_go_on_from_the_checkpoint(
    ranks: harness.Ranks, torch_store: tuple[str, int], tmp_path: Path, victims: set[int]
) -> None:
    wanted = TorchKeeper(ranks, torch_store, STAGES, training(tmp_path)).values()
    for old in tmp_path.iterdir():
        old.unlink()
    job = TorchKeeper(ranks, torch_store, STAGES, training(tmp_path))
    job.run_until(lambda: all((rank, "step", 9) in job.group._marks for rank in victims))
    for victim in victims:
        assert job.kill(victim)
    assert job.values() == wanted
    begun = {(rank, at) for rank, what, at in job.group._marks if what == "from"}
    assert {(victim, 8) for victim in victims} <= begun


def test_a_stage_goes_on_from_the_checkpoint_on_another_host(
    ranks: harness.Ranks, torch_store: tuple[str, int], tmp_path: Path
) -> None:
    """Each stage has a host of its own, and the logs of the first one stay there. The checkpoints are on a disk that all have."""
    wanted = TorchKeeper(ranks, torch_store, STAGES, training(tmp_path), transport="tcp").values()
    for old in tmp_path.iterdir():
        old.unlink()
    program = training(tmp_path, (1, 9), (2, 12))
    job = TorchKeeper(ranks, torch_store, STAGES, program, transport="tcp", on_death=another_host)
    assert job.values() == wanted
    assert [rank for rank, _ in job.deaths] == [1, 2]
    begun = {(rank, at) for rank, what, at in job.group._marks if what == "from"}
    assert {(1, 8), (2, 12)} <= begun
