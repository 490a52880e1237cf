"""What test_soak.py has ftrun start: the training of examples/train_digits.py, for as long as the test goes on killing."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_digits as task

import ftcomm.torch

LAST_STEPS = 300  # with a falling learning rate, once the kills are over
STOP = Path(os.environ["SOAK_STOP"])


def say(*words: Any) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = hashlib.sha256()
    for value in model.state_dict().values():
        state.update(value.numpy().tobytes())
    for one in optimizer.state.values():
        state.update(one["momentum_buffer"].numpy().tobytes())
    return state.hexdigest()[:16]


def main() -> None:
    rank, incarnation = int(os.environ["RANK"]), os.environ["FTCOMM_INCARNATION"]
    say("started", rank, os.getpid(), 0)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = task.load()
    dist.init_process_group("ftcomm")
    model = task.build()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, ftcomm.torch.lossy_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=task.PEAK_RATE, momentum=0.9, weight_decay=1e-4)
    end, first = 0, True
    while True:
        here = ftcomm.torch.join_point(ddp, optimizer, extra={"end": end})
        end = here.extra["end"]
        if first:
            say("in", rank, os.getpid(), here.step)
            first = False
        if here.joined:
            say("joined", rank, here.step, digest(model, optimizer))
        if end and here.step >= end:
            break
        stop = torch.tensor([STOP.exists()], dtype=torch.int32)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)  # the same answer on all, whoever dies meanwhile
        if stop.item() and not end:
            text = STOP.read_text()
            end = int(text) if text else here.step + LAST_STEPS
        left = min(1.0, (end - here.step) / LAST_STEPS) if end else 1.0
        for group in optimizer.param_groups:
            group["lr"] = 0.3 * task.PEAK_RATE * left
        torch.manual_seed(task.seed_of(here.step, rank))
        inputs, targets = task.batch_of(here.step, rank, images, labels, 32)
        loss = F.cross_entropy(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if here.step % 20 == 0:
            say("step", rank, here.step, loss.item())
    say("done", rank, incarnation, here.step, digest(model, optimizer), task.accuracy(model, test_images, test_labels))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
