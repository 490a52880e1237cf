"""A small training with the engine, and the comparison of what comes out with what comes out undisturbed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from kept import Kept, digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ftcomm.recovery

STEPS = 6
GENERATOR = torch.Generator().manual_seed(3)
X, Y = torch.randn(400, 8, generator=GENERATOR), torch.randn(400, 1, generator=GENERATOR)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 1))


class Script:
    """A small training; a test overrides what is unusual in its own."""

    strategy = "replication"
    ddp: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 0.0005}
    engine: ClassVar[dict[str, Any]] = {}
    epochs = 1
    set_to_none = True
    samples = 0

    def __init__(self, context: Any) -> None:
        self.context = context

    def first(self, rank: int) -> bool:
        """This is the first process of that rank."""
        return bool(self.context.rank == rank and self.context.incarnation == 0)

    def make(self) -> nn.Module:
        return net()

    def before(self, step: int, x: Any) -> Any:
        return x

    def forward(self, step: int, x: Any, y: Any) -> None:
        (self.model(x) - y).square().mean().backward()

    def update(self, step: int) -> None:
        self.optimizer.step()

    def end(self, step: int) -> None:
        pass

    def after(self, step: int) -> None:
        pass

    def around(self) -> Any:
        """The body of the loop."""
        return nullcontext()

    def run(self) -> Any:
        torch.manual_seed(1)
        self.model = DistributedDataParallel(self.make(), **self.ddp)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.made = ftcomm.recovery.Engine(self.model, self.optimizer, self.strategy, **self.engine)
        count = self.samples or 4 * STEPS * dist.get_world_size()
        loader = DataLoader(TensorDataset(X[:count], Y[:count]), batch_size=4)
        for step, (x, y) in self.made.steps(loader, epochs=self.epochs):
            self.context.mark("batch", (step, self.context.incarnation))
            inputs = self.before(step, x)
            with self.around(), self.made.step():
                self.forward(step, inputs, y)
                self.update(step)
                self.optimizer.zero_grad(self.set_to_none)
                self.end(step)
            self.after(step)
        return digest(self.model.module, self.optimizer), self.made.step_number


def kept(world: Any, script: Any, size: int = 3, **options: Any) -> tuple[set[Any], list[int]]:
    job = Kept(world, lambda context: script(context).run(), size, **options)
    return set(job.values()), job.incarnation


def exact(world: Any, script: Any, size: int = 3, died: int = 1, **options: Any) -> None:
    """What comes out is what comes out when nobody dies."""

    class Calm(script):  # type: ignore[misc]
        def first(self, rank: int) -> bool:
            return False

    faults = options.pop("faults", "")
    wanted, _ = kept(world, Calm, size, **options)
    found, incarnations = kept(world, script, size, faults=faults, **options)
    assert sum(incarnations) == died
    assert len(wanted) == 1
    assert found == wanted
