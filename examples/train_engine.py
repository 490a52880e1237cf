"""train_digits.py with the recovery engine: a run that ends with the same bits, whoever is killed on the way.

    ftrun --nproc-per-node 4 --policy lossy examples/train_engine.py
    ftrun --nproc-per-node 4 --policy lossy --faults "rank=2,at=step:100,do=kill" examples/train_engine.py   # the same weights

With --hsdp the model is sharded (FSDP2) over the ranks of each of two replicas; that takes an even number of ranks.

All that there is for failures: the engine, its loop and `with engine.step()`.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from train_digits import accuracy, build, digest, load

import ftcomm.recovery


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    if dist.get_world_size() % 2:
        text = f"With --hsdp the number of ranks has to be even: there are two replicas. There are {dist.get_world_size()}."
        if dist.get_rank() == 0:
            print(text, file=sys.stderr)
        dist.barrier()  # when one has ended the launcher may end the others: it is said by then
        sys.exit(1)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def whole(model: torch.nn.Module) -> torch.nn.Module:
    """Collective: the model with all of its weights."""
    made = build()
    weights = model.state_dict()
    made.load_state_dict({name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in weights.items()})
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--hsdp", action="store_true")
    parser.add_argument("--checkpoints", help="folder; the run goes on from the newest one in it")
    args = parser.parse_args()

    torch.set_num_threads(1)
    images, labels, test_images, test_labels = load()
    dist.init_process_group("ftcomm")
    model = build()
    parallel = sharded(model) if args.hsdp else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)

    engine = ftcomm.recovery.Engine(parallel, optimizer, args.strategy, args.checkpoints)
    for step, (inputs, targets) in engine.steps(loader, epochs=args.epochs):
        with engine.step():
            loss = F.cross_entropy(parallel(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step:5d}   loss {loss.item():.4f}", flush=True)

    model = whole(model)
    if dist.get_rank() == 0:
        final = accuracy(model, test_images, test_labels)
        print(f"accuracy {100 * final:.2f} %   weights {digest(model)[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
