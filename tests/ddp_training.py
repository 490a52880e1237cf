"""A training by DistributedDataParallel with the engine, what kills a rank at each phase of a step, and what came out."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kept import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ftcomm
import ftcomm.recovery
from ftcomm.torch import groups

# What sklearn.datasets.load_digits() reads, without two seconds of imports in each of pytest's workers.
SKLEARN = importlib.util.find_spec("sklearn")
if SKLEARN is None or SKLEARN.origin is None:
    pytest.skip("needs scikit-learn", allow_module_level=True)
ROWS = torch.from_numpy(np.loadtxt(Path(SKLEARN.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=","))
IMAGES, LABELS = ROWS[:, :-1].float().reshape(-1, 1, 8, 8) / 16, ROWS[:, -1].long()
STEPS = 12  # of an epoch
AT = 5  # the step in which the victim dies
BUCKETS = 4
BATCH = 4


def digits(samples: int) -> TensorDataset:
    return TensorDataset(IMAGES[:samples], LABELS[:samples], torch.arange(samples))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.1),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Any) -> Any:
        return self.head(self.features(x))


class Kill:
    """Where the victim dies."""

    def __init__(self, context: Any, phase: str, victim: int, model: Any) -> None:
        self.context, self.phase, self.model = context, phase, model
        self.armed = context.rank == victim and context.incarnation == 0

    def at(self, step: int, phase: str) -> None:
        if self.armed and step == AT and phase == self.phase:
            self.context.die()

    def in_backward(self, step: int) -> None:
        """When this share of the buckets is on its way, and not one more."""
        if not (self.armed and step == AT and self.phase.startswith("backward")):
            return
        parameters = list(self.model.parameters())
        # As rebuilt after the first step: in the order in which gradients come.
        buckets = self.model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"].split(", ")
        assert len(buckets) == BUCKETS
        first = int(buckets[BUCKETS * int(self.phase.split("-")[1]) // 100].split()[0])
        parameters[first].register_hook(lambda _: self.context.die())

    def in_scheduler(self, step: int, scheduler: Any) -> None:
        """When it has computed the rate, and not written it."""
        if self.armed and step == AT and self.phase == "scheduler":
            compute = scheduler.get_lr
            scheduler.get_lr = lambda: (compute(), self.context.die())

    def in_checkpoint(self) -> None:
        """When it is written under another name, or has its own."""
        if not (self.armed and self.phase.startswith("checkpoint")):
            return
        whole = os.replace

        def replaced(source: Any, target: Any) -> None:
            if self.phase == "checkpoint-after":
                whole(source, target)
            self.context.die()

        os.replace = replaced  # type: ignore[assignment]

    def in_update(self, step: int) -> None:
        if not (self.armed and step == AT and self.phase == "update"):
            return
        from torch.optim import adam

        whole = adam._single_tensor_adam

        def half(*lists: Any, **more: Any) -> None:
            middle = len(lists[0]) // 2
            whole(*[part[:middle] if isinstance(part, list) else part for part in lists], **more)
            self.context.die()

        adam._single_tensor_adam = half


def train(
    context: Any,
    phase: str = "",
    victim: int = 2,
    epochs: int = 2,
    samples: int = 0,
    hold: bool = False,
    enough: Path | None = None,
    scaled: str = "",
    device: str = "cpu",
    **more: Any,
) -> dict[str, Any]:
    """``enough``: all stop after the same step, when it is there. ``scaled``: with a gradient scaler; "fused" or not."""
    if device != "cpu":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    net = Net().to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False, fused=scaled == "fused")
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3) if scaled else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    data = digits(samples or BATCH * dist.get_world_size() * STEPS)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    engine = ftcomm.recovery.Engine(model, optimizer, scheduler=scheduler, scaler=scaler, **more)
    kill = Kill(context, phase, victim, model)
    if hold and context.rank == 0:
        job = groups.job_of(groups.backend_of())
        job.add_listener(lambda event: event["event"] == "join-waiting" and context.mark("somebody waits"))
    kill.in_checkpoint()
    begun = False
    for step, (images, labels, numbers) in engine.steps(loader, epochs=epochs):
        if not begun:
            begun = True
            context.mark("trains", context.incarnation)
        counts = engine._step._gradients.weight > 0  # else a filler, at the end of an epoch
        context.mark("batch", (step, engine.epoch, numbers.tolist() if counts else []))
        epoch = engine.epoch
        kill.at(step, "between")
        if step == AT and engine._folder is not None and not phase.startswith("checkpoint"):
            engine._folder.wait()
        with engine.step():
            stop = torch.tensor([enough is not None and enough.exists()], dtype=torch.uint8)
            if enough is not None:
                dist.all_reduce(stop, dist.ReduceOp.MAX)
            kill.at(step, "forward")
            kill.in_backward(step)
            with torch.autocast(device, torch.bfloat16, enabled=scaler is not None):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            if scaler is not None:  # two updates are skipped: one in the step of the death, one before it
                loss = scaler.scale(loss) * (
                    float("inf") if step == AT - 2 or (step == AT and scaled == "skipped") else 1.0
                )
            loss.backward()
            kill.at(step, "before-update")
            kill.in_update(step)
            if scaler is None:
                optimizer.step()
            else:
                if scaled == "unscaled":
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            kill.in_scheduler(step, scheduler)
            scheduler.step()
            optimizer.zero_grad()
            kill.at(step, "end")
        if engine.committed:
            context.mark("in", (step, epoch, sorted(engine._step.contributed)))
        if stop.item() and engine.committed:
            break
        if hold and step == AT + 2 and context.rank == 0:
            context.mark("missed")
            context.hold()
    return {
        "digest": digest(net, optimizer),
        "rate": scheduler.get_last_lr(),
        "scale": None if scaler is None else scaler.get_scale(),
        "steps": engine.step_number,
        "progress": engine.progress.state_dict(),
        "accuracy": accuracy(net.cpu()),
    }


def accuracy(net: Any) -> float:
    images, labels, _ = digits(1797).tensors
    net.eval()
    with torch.no_grad():
        return float((net(images[800:]).argmax(1) == labels[800:]).float().mean())


class Run:
    """A training on four ranks. ``values``: of those that have come to the end."""

    def __init__(
        self,
        world: Any,
        phase: str = "",
        victim: int = 2,
        replace: str = "at once",
        options: Any = None,
        **settings: Any,
    ) -> None:
        settings["hold"] = replace == "later"
        group = world.start(
            4, lambda context: train(context, phase, victim, **settings), policy="lossy", **(options or {})
        )
        if phase:
            group.wait_ended(victim)
            if replace == "later":
                group.wait_for(0, "missed")
            if replace != "never":
                world.replace(group, victim)
            if replace == "later":
                group.wait_for(0, "somebody waits")
                group.release(0)
        values = world.values(group, dies=(victim,) if phase else ())
        self.values = [value for value in values if value is not None]
        self.marks = group._marks

    @property
    def digests(self) -> set[str]:
        return {value["digest"] for value in self.values}

    def only(self, name: str) -> Any:
        """What all of them say."""
        found = [value[name] for value in self.values]
        assert all(value == found[0] for value in found), found
        return found[0]

    def samples(self, epoch: int, lost: Any = None) -> list[int]:
        """Committed samples of the epoch. ``lost(rank, step)``: that batch was not committed."""
        last = {}  # a step that is done again has another batch
        for rank, name, value in self.marks:
            if name == "batch" and value[1] == epoch:
                last[rank, value[0]] = value[2]
        return sorted(n for (rank, step), ns in last.items() if not (lost and lost(rank, step)) for n in ns)


PHASES = [
    "between",
    "forward",
    "backward-25",
    "backward-50",
    "backward-75",
    "before-update",
    "update",
    "scheduler",
    "end",
]
CHECKPOINT = ["checkpoint-before", "checkpoint-after"]
COMPLETE = ("update", "scheduler", "end")  # the others have all gradients of the victim
ALL = list(range(4 * BATCH * STEPS))


def used_samples(marks: list[Any]) -> dict[int, list[int]]:
    """Of each epoch, those whose gradients are in its committed steps."""
    batches = {(rank, value[0]): value for rank, name, value in marks if name == "batch"}  # the last one counts
    used: dict[int, list[int]] = {}
    for step, epoch, ranks in {(step, epoch, tuple(ranks)) for _, name, (step, epoch, ranks) in said(marks, "in")}:
        for rank in ranks:
            used.setdefault(epoch, []).extend(batches[rank, step][2])
    return {epoch: sorted(samples) for epoch, samples in used.items()}


def said(marks: list[Any], what: str) -> list[Any]:
    return [mark for mark in marks if mark[1] == what]


def diary(marks: list[Any], epoch: int) -> str:
    """What each rank had and which ranks' gradients each committed step of the epoch has, as it was told."""
    return "\n".join(
        f"{rank} {name} {value}" for rank, name, value in marks if name in ("batch", "in") and value[1] == epoch
    )


_UNDISTURBED: dict[Any, Run] = {}


def undisturbed(world: Any, **settings: Any) -> Run:
    """A run by replication in which nobody dies; one for all tests of a process."""
    key = tuple(sorted(settings.items()))
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = Run(world, strategy="replication", **settings)
        assert len(_UNDISTURBED[key].digests) == 1
    return _UNDISTURBED[key]
