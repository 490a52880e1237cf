"""A pipeline under strategy parallel-replay, and the plain script whose bits it has to have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from kept import digest
from torch import nn
from torch.distributed import pipelining
from torch.utils.data import DataLoader, TensorDataset
from torch_keeper import Keep, TorchKeeper

import ftcomm.recovery
import ftcomm.torch
from ftcomm.recovery.data.seeded import mixed
from ftcomm.recovery.engine.parallel import helpers
from ftcomm.recovery.engine.restorable import reseed

STAGES, WIDTH, MICRO = 4, 33, 6
BATCH = 4 * MICRO
SAMPLES, EPOCHS, EVERY = 6 * BATCH, 2, 4
STEPS = EPOCHS * SAMPLES // BATCH
AT = 10  # who dies in that step has done steps 8 and 9 since its checkpoint; and from there on 11 steps without any
INPUTS = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))


class Layers(nn.Module):
    """Has what the sum of gradients could go wrong with: tied weights, a parameter without gradients, a frozen one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.idle = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs)))) + self.frozen


def schedule_of(layers: nn.Module, kind: str = "Schedule1F1B") -> Any:
    stage = pipelining.PipelineStage(layers, dist.get_rank(), STAGES, torch.device("cpu"))
    return getattr(pipelining, kind)(stage, MICRO, loss_fn=nn.functional.mse_loss)


def one_step(schedule: Any, layers: nn.Module, optimizer: Any, inputs: Any) -> list[float]:
    """With what scripts do between the backward pass and the update: it needs the gradients."""
    losses: list[Any] = []
    outputs = None
    if dist.get_rank() == 0:
        schedule.step(inputs)
    elif dist.get_rank() == STAGES - 1:
        outputs = schedule.step(target=inputs.sin(), losses=losses)
    else:
        schedule.step()
    norm = nn.utils.clip_grad_norm_(layers.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    seen = [] if outputs is None else [outputs.double().sum().item()]
    return [*(loss.item() for loss in losses), norm.item(), *seen]


def plain(kind: str = "Schedule1F1B", make: Any = Layers) -> Callable[[harness.Context], Any]:
    def run(context: harness.Context) -> Any:
        layers = make(context.rank)
        schedule = schedule_of(layers, kind)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2, foreach=False)
        losses: dict[int, list[float]] = {}
        torch.use_deterministic_algorithms(True)
        for step in range(STEPS):
            epoch, at = divmod(step, SAMPLES // BATCH)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mixed(0, epoch)))
            reseed(0, step, context.rank)
            losses[step] = one_step(schedule, layers, optimizer, INPUTS[order[at * BATCH : (at + 1) * BATCH]])
        return losses, digest(layers, optimizer), STEPS

    return run


def training(
    folder: Path | None,
    victims: tuple[int, ...] = (),
    kind: str = "Schedule1F1B",
    make: Any = Layers,
    prepare: Callable[[harness.Context], None] | None = None,
    at: int = AT,
    change: Callable[[int, Any], None] | None = None,
    **loading: Any,
) -> Callable[[harness.Context], Any]:
    """The victims' first processes die in the middle of that step."""

    def run(context: harness.Context) -> Any:
        helpers.SLACK = 30.0  # who gets no processor for a second, beside other tests, is not slow
        layers = make(context.rank)
        schedule = schedule_of(layers, kind)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2, foreach=False)
        engine = ftcomm.recovery.Engine(
            layers,
            optimizer,
            "parallel-replay",
            folder,
            checkpoint_every=EVERY,
            schedule=schedule,
        )
        ftcomm.torch.communicator()._job.add_listener(
            lambda e: (
                context.mark(e["event"], {**e, "rank": context.rank})
                if e["event"] in ("parallel-replay", "helped")
                else None
            )
        )
        if prepare is not None:
            prepare(context)
        context.mark("running")
        losses: dict[int, list[float]] = {}
        forward, now, calls = schedule._stage.forward_one_chunk, [-1], [0]

        def until_death(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if (
                context.rank in victims
                and now[0] == at
                and calls[0] == 3 - victims.index(context.rank)
                and context.incarnation == 0
            ):
                context.die()
            return forward(*args, **kwargs)

        schedule._stage.forward_one_chunk = until_death
        loader = DataLoader(TensorDataset(INPUTS, torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True, **loading)
        for step, (inputs, _) in engine.steps(loader, epochs=EPOCHS):
            context.mark("step", (step,))
            now[0], calls[0] = step, 0
            if change is not None:
                change(step, layers)
            with engine.step():
                losses[step] = one_step(schedule, layers, optimizer, inputs)
        assert "step" not in vars(schedule)
        return losses, digest(layers, optimizer), engine.step_number

    return run


def events(job: TorchKeeper, name: str) -> list[Any]:
    return [value for _, what, value in job.group._marks if what == name]


def log_of(job: TorchKeeper, rank: int, incarnation: int = 1) -> str:
    return str(job.group._processes[rank, incarnation].result.log)


_known: dict[Any, list[Any]] = {}


def plain_values(keep: Keep, kind: str = "Schedule1F1B", make: Any = Layers) -> list[Any]:
    """Of the plain script, run once for each module."""
    if (kind, make) not in _known:
        _known[kind, make] = keep(plain(kind, make)).values()
    return _known[kind, make]
