"""A training by FSDP2 over two replicas of two shards (HSDP) with the engine, and what kills a rank at each phase of a step."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from kept import Kept
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ftcomm.recovery

needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason=f"torch {torch.__version__} has no FSDPModule.reset_iter_state()",
)

STEPS = 6  # of an epoch
AT = 3  # the step in which the victim dies
BATCH = 4
SAMPLES = 4 * BATCH * STEPS
X = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(X, X[:, :3].argmax(1), torch.arange(SAMPLES))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


def build(sharded: bool = True, shape: tuple[int, ...] = (2, 2), device: str = "cpu") -> Any:
    """Some parameters have odd sizes, so that the ranks' shards differ in size; one rank has none of the last bias."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 15), Block(15), Block(15), Block(15), nn.Linear(15, 3)).to(device)
    if sharded:
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        for block in net[1:4]:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def loader() -> Any:
    return DataLoader(DATA, batch_size=BATCH, shuffle=True)


class Kill:
    """Where this rank dies, if it is one of the victims."""

    def __init__(self, context: Any, phase: str, victims: tuple[int, ...], net: Any) -> None:
        self.context, self.phase, self.net = context, phase, net
        self.armed = context.rank in victims and context.incarnation == 0

    def at(self, step: int, phase: str) -> None:
        if not (self.armed and step == AT and phase == self.phase):
            return
        if phase == "forward":
            self.net[2].register_forward_pre_hook(lambda *_: self.context.die())
        elif phase == "backward":
            self.net[2].register_full_backward_hook(lambda *_: self.context.die())
        elif phase == "update":
            self.in_update()
        else:
            self.context.die()

    def in_update(self) -> None:
        from torch.optim import adam

        whole = adam._single_tensor_adam

        def half(*lists: Any, **more: Any) -> None:
            middle = len(lists[0]) // 2
            whole(*[part[:middle] if isinstance(part, list) else part for part in lists], **more)
            self.context.die()

        adam._single_tensor_adam = half


def full(net: Any, optimizer: Any) -> Any:
    """All weights and moments, whole. Collective."""
    tensors = [*net.state_dict().values()]
    tensors += [value for values in optimizer.state_dict()["state"].values() for value in values.values()]
    return [(value.full_tensor() if hasattr(value, "full_tensor") else value).tolist() for value in tensors]


def train(
    context: Any,
    phase: str = "",
    victims: tuple[int, ...] = (),
    epochs: int = 2,
    shape: Any = (2, 2),
    device: str = "cpu",
    **more: Any,
) -> Any:
    if device != "cpu":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    net = build(shape=shape, device=device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, foreach=False)
    engine = ftcomm.recovery.Engine(net, optimizer, **{"strategy": "replication", **more})
    kill = Kill(context, phase, victims, net)
    begun = False
    for step, (x, y, numbers) in engine.steps(loader(), epochs=epochs):
        if not begun:
            begun = True
            context.mark("trains", context.incarnation)
        context.mark("batch", (step, engine.epoch, numbers.tolist()))
        kill.at(step, "between")
        if step == AT and engine._folder is not None:
            engine._folder.wait()
        with engine.step():
            kill.at(step, "forward")
            kill.at(step, "backward")
            nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            kill.at(step, "before-update")
            kill.at(step, "update")
            optimizer.step()
            optimizer.zero_grad()
            kill.at(step, "end")
    return {"full": full(net, optimizer), "progress": engine.progress.state_dict(), "steps": engine.step_number}


def ended(world: Any, fn: Any, faults: str = "", restarts: bool = True) -> tuple[list[Any], Any]:
    """Values of a job whose dead are replaced, and the job."""
    job = Kept(world, fn, faults=faults)
    return job.values(), job


_UNDISTURBED: dict[str, dict[str, Any]] = {}


def undisturbed(world: Any, device: str = "cpu") -> dict[str, Any]:
    """`full` and `marks` of a run in which nobody dies; one for all tests of a process."""
    if device not in _UNDISTURBED:
        values, job = ended(world, lambda context: train(context, device=device))
        assert all(value == values[0] for value in values)
        _UNDISTURBED[device] = {"full": values[0]["full"], "marks": job.group._marks}
    return _UNDISTURBED[device]


def samples(marks: Any, epoch: int) -> list[int]:
    """Of the epoch. A step that is done again has the same batch."""
    taken = {(rank, value[0]): value[2] for rank, name, value in marks if name == "batch" and value[1] == epoch}
    return sorted(number for numbers in taken.values() for number in numbers)
