"""The stages of parallel_recovery.py: a pipeline with the recovery engine, of which one stage kills itself once.

Started by ftrun with what it has to do in PARALLEL, a JSON object. Each process writes into a file of its own what happened when.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _diary import Diary, process_number
from _pipeline_ranks import digest_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

import ftcomm.recovery
import ftcomm.torch

READY = time.monotonic_ns()
Plan = dict[str, Any]


class _Wait(torch.autograd.Function):
    """Takes no processor, as a pass on a device does: so long forward, and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Layers(nn.Module):
    def __init__(self, rank: int, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(rank)
        width = plan["width"]
        blocks = [part for _ in range(plan["layers"]) for part in (nn.Linear(width, width), nn.Tanh())]
        self.blocks, self.seconds = nn.Sequential(*blocks), plan["wait"] / 1000

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.blocks(inputs)
        return _Wait.apply(outputs, self.seconds) if self.seconds else outputs  # type: ignore[no-any-return]


def main(plan: Plan) -> None:
    rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(plan["folder"])
    diary = Diary(folder, rank, process_number())
    diary.note("ready", READY)
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    diary.note("joined")
    layers = Layers(rank, plan)
    stage = PipelineStage(layers, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, plan["micro_batches"], loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(layers.parameters(), 1e-3)
    rows, steps = plan["micro_batches"] * plan["rows"], plan["iterations"]
    samples = torch.randn(4 * rows, plan["width"], generator=torch.Generator().manual_seed(1))
    engine = ftcomm.recovery.Engine(
        layers,
        optimizer,
        plan["strategy"],
        folder / "checkpoints",
        checkpoint_every=plan["checkpoint"],
        schedule=schedule,
    )

    def hear(event: dict[str, Any]) -> None:
        if event["event"] in ("caught-up", "parallel-replay"):
            diary.note(event["event"], value=event)

    ftcomm.torch.communicator().job.add_listener(hear)
    forward, now, calls = stage.forward_one_chunk, [-1], [0]

    def until_death(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        told = process_number() == 0 and now[0] == plan["kill"] and rank == plan["victim"]
        if told and calls[0] == plan["micro_batches"] // 2 + 1:
            diary.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args, **kwargs)

    stage.forward_one_chunk = until_death  # type: ignore[method-assign]
    loader = DataLoader(TensorDataset(samples), batch_size=rows)
    for step, (inputs,) in engine.steps(loader, epochs=-(-steps // 4)):
        now[0], calls[0] = step, 0
        with engine.step():
            if rank == 0:
                schedule.step(inputs)
            elif rank == stages - 1:
                schedule.step(target=inputs.sin())
            else:
                schedule.step()
            optimizer.step()
            optimizer.zero_grad()
        diary.note("iteration", number=step)
    diary.note("digest", value=digest_of(p.detach().numpy() for p in layers.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(os.environ["PARALLEL"]))
