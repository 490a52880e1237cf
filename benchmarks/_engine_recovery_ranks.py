"""A rank of engine_recovery.py: DistributedDataParallel on random data, with the engine, torchft, or neither (``plain``).

Writes lines ``what time pid`` into a file of its own; times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import _torchft
import torch
import torch.distributed as dist
from _diary import process_number
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ftcomm.recovery
import ftcomm.torch

TORCHFT = _torchft.SETTINGS
WIDTH, SAMPLES, BATCH = 512, 4096, 16


def main(args: argparse.Namespace) -> None:
    """Until --steps are done or the driver has made the file ``stop``; torchft's ranks until --steps only."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.worker not in TORCHFT:
        dist.init_process_group("ftcomm")
    held = bytearray(args.memory_mib << 20)
    held[:: os.sysconf("SC_PAGESIZE")] = b"x" * len(held[:: os.sysconf("SC_PAGESIZE")])
    rank, incarnation = _torchft.rank() if args.worker in TORCHFT else dist.get_rank(), process_number()
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    ddp: Any = model if args.worker in TORCHFT else DistributedDataParallel(model)
    optimizer: Any = torch.optim.AdamW(ddp.parameters())
    data = TensorDataset(torch.randn(SAMPLES, 64), torch.randint(10, (SAMPLES,)))
    loader = DataLoader(data, batch_size=BATCH, num_workers=args.workers, persistent_workers=args.workers > 0)
    loss_of = nn.CrossEntropyLoss()
    with open(Path(args.folder) / f"times-{rank}-{incarnation}", "w", buffering=1) as out:

        def say(what: str) -> None:
            out.write(f"{what} {time.monotonic()} {os.getpid()}\n")

        def over(step: int) -> bool:
            stop = torch.tensor([float((Path(args.folder) / "stop").exists() or step >= args.steps)])
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            return bool(stop.item())

        if args.worker in TORCHFT:
            say("asks")
            peer = _torchft.Worker(model, optimizer)
            sampler: Any = torch.utils.data.DistributedSampler(data, args.ranks, rank)
            loader = DataLoader(
                data, BATCH, sampler=sampler, num_workers=args.workers, persistent_workers=args.workers > 0
            )
            while peer.manager.current_step() < args.steps:
                for x, y in loader:
                    step = peer.manager.current_step()
                    peer.optimizer.zero_grad()
                    loss_of(peer.ddp(x), y).backward()
                    peer.optimizer.step()
                    if peer.manager.current_step() > step:
                        say("step")
                    if step + 1 >= args.steps:
                        break
            peer.manager.shutdown(wait=False)
            return
        if args.worker == "plain":
            ddp.register_comm_hook(None, ftcomm.torch.lossy_hook)
            sampler = torch.utils.data.DistributedSampler(data)
            loader = DataLoader(
                data, BATCH, sampler=sampler, num_workers=args.workers, persistent_workers=args.workers > 0
            )
            step = 0
            while step < args.steps:
                for x, y in loader:
                    ftcomm.torch.join_point(ddp, optimizer)
                    loss_of(ddp(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    say("step")
                    step += 1
                    if over(step):
                        break
        else:
            engine = ftcomm.recovery.Engine(ddp, optimizer, args.worker)
            for step, (x, y) in engine.steps(loader, epochs=1 << 30):
                with engine.step():
                    loss_of(ddp(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if engine.committed:
                    say("step")
                if over(step):
                    break
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("worker", help="strategy of the engine, plain, or torchft's setting")
    parser.add_argument("--folder")
    for name in ("--steps", "--memory-mib", "--workers", "--ranks"):
        parser.add_argument(name, type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
