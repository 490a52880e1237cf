"""pipeline_replay.py with the recovery engine: checkpoints, and batches from a DataLoader, each sample once an epoch.

    ftrun --nproc-per-node 4 --policy replay examples/pipeline_engine.py
    ftrun --nproc-per-node 4 --policy replay examples/pipeline_engine.py --checkpoints ckpt --kill 2:40

    ftrun --nproc-per-node 4 --policy replay examples/pipeline_engine.py --parallel --kill 2:40

    ftrun --nproc-per-node 4 --policy replay examples/pipeline_engine.py --copies 2 --checkpoints ckpt --kill 2:30

The digest at the end is the same whoever was killed. With --checkpoints a stage that dies loads its last one and does again what
came after it; and when all have died, the same command goes on from the newest that all stages have. With --parallel the others
compute a part of what a stage does again; and there is no dropout, as a generator cannot be in two places. With --copies each
stage is there several times, as a DistributedDataParallel, and the copies have different samples.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from pipeline_replay import CONTEXT, die_if_told, digest_of, layers_of, loss_of, stages_of, text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ftcomm.recovery


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets, cut out of the text one after another."""

    def __init__(self, count: int) -> None:
        self._data = text()[: count * CONTEXT + 1]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._data[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=640, help="of an epoch (default 640)")
    parser.add_argument("--checkpoints", help="folder; the run goes on from the newest one in it")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints (default 20)")
    parser.add_argument("--copies", type=int, default=1, help="of each stage (default 1)")
    parser.add_argument("--parallel", action="store_true", help="strategy parallel-replay, without dropout")
    parser.add_argument("--kill", metavar="RANK:STEP", action="append", default=[], help="SIGKILL to a rank")
    args = parser.parse_args()
    if args.copies < 1:
        parser.error("--copies is 1 or more")

    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    rank, stages = dist.get_rank(), stages_of(dist.get_world_size(), args.copies)
    number = rank % stages
    torch.manual_seed(number)
    layers = layers_of(number, stages, blocks=2)
    if args.parallel:
        for dropout in [module for module in layers.modules() if isinstance(module, nn.Dropout)]:
            dropout.p = 0.0
    model: nn.Module = layers
    group = None
    if args.copies > 1:
        mesh = init_device_mesh("cpu", (args.copies, stages), mesh_dim_names=("copy", "stage"))
        group = mesh.get_group("stage")
        model = DistributedDataParallel(layers, process_group=mesh.get_group("copy"))
    stage = PipelineStage(model, number, stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 8, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(layers.parameters(), 2e-3)
    loader = DataLoader(Windows(args.samples), batch_size=16, shuffle=True, drop_last=True)
    engine = ftcomm.recovery.Engine(
        model,
        optimizer,
        "parallel-replay" if args.parallel else "auto",
        checkpoint_dir=args.checkpoints,
        checkpoint_every=args.every,
        schedule=schedule,
    )
    for step, (inputs, targets) in engine.steps(loader, epochs=args.epochs):
        losses: list[Tensor] = []
        with engine.step():
            if number == 0:
                schedule.step(inputs)
            elif number == stages - 1:
                schedule.step(target=targets, losses=losses)
            else:
                schedule.step()
            die_if_told(args.kill, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        if losses and rank == stages - 1 and step % 10 == 0:
            print(f"step {step:4d}   loss {torch.stack(losses).mean().item():.6f}", flush=True)

    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest_of(layers))
    if rank == 0:
        print(f"digest {hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
