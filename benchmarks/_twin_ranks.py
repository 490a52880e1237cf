"""The ranks of twin_recovery.py: two stages, each twice, of which one rank kills itself once. PLAN says what to do."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _diary import Diary, process_number
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ftcomm.recovery
from ftcomm.recovery.engine import staged, twins

READY = time.monotonic_ns()
STAGES = COPIES = 2
BATCH, VICTIM = 16, 1


def main() -> None:
    plan: dict[str, Any] = json.loads(os.environ["PLAN"])
    if plan["system"] == "checkpoint":  # replicas are asked for nothing
        twins.Twins.fetch = lambda *_: None  # type: ignore[assignment, method-assign]
    if plan["system"] == "no-notes":  # nor is anything done for them
        staged.Staged._begins = staged.Staged._updates = lambda _: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    rank = dist.get_rank()
    diary = Diary(Path(plan["folder"]), rank, process_number())
    diary.note("ready", READY)
    mesh = init_device_mesh("cpu", (COPIES, STAGES), mesh_dim_names=("copy", "stage"))
    number, width = rank % STAGES, plan["width"]
    torch.manual_seed(number)
    layers = nn.Sequential(*(m for _ in range(plan["layers"]) for m in (nn.Linear(width, width), nn.Tanh())))
    model = DistributedDataParallel(layers, process_group=mesh.get_group("copy"))
    stage = PipelineStage(model, number, STAGES, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(layers.parameters(), 1e-3)
    inputs = torch.randn(BATCH * COPIES * plan["steps"], width, generator=torch.Generator().manual_seed(5))
    engine = ftcomm.recovery.Engine(
        model, optimizer, checkpoint_dir=Path(plan["folder"]) / "ckpt", checkpoint_every=plan["checkpoint"]
    )
    joined = False
    for step, (batch,) in engine.steps(DataLoader(TensorDataset(inputs), batch_size=BATCH)):
        if step > 0 and not joined:
            diary.note("joined", number=step)
            joined = True
        begin = time.monotonic_ns()
        with engine.step():
            if step == plan["kill"] and rank == VICTIM and process_number() == 0:
                diary.note("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch.sin())
            optimizer.step()
            optimizer.zero_grad()
        diary.note("step", number=step, took=time.monotonic_ns() - begin)
    state = b"".join(value.numpy().tobytes() for value in layers.state_dict().values())
    diary.note("digest", value=hashlib.sha256(state).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
