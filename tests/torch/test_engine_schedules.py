"""Schedules that an adversary would choose: deaths between two operations of a step, odd steps, two recoveries in one."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from engine_script import STEPS, Script, exact, kept, net
from tables import most
from torch import nn
from torch.optim import lr_scheduler

import ftcomm
import ftcomm.recovery
import ftcomm.torch
from ftcomm.recovery.engine import replicated
from ftcomm.recovery.engine.restorable import Restorable
from ftcomm.torch import groups

SETTINGS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
]


def test_a_rank_that_has_left_is_not_expected_by_a_newcomer(world: Any) -> None:
    class Leaves(Script):
        def make(self) -> nn.Module:
            return nn.Linear(8, 1)  # a batch of one sample is nothing for BatchNorm

        def before(self, step: int, x: Any) -> Any:
            if step == 1 and self.first(3):
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 3 and self.first(2):
                self.context.die()
            return x

        def run(self) -> Any:
            try:
                return super().run()
            except SystemExit as left:
                assert left.code == 0
                return None

    found, incarnations = kept(world, Leaves, 4)
    assert incarnations == [0, 0, 1, 0]
    assert len(found) == 1


def test_two_backward_passes_in_the_first_step(world: Any) -> None:
    class Twice(Script):
        def forward(self, step: int, x: Any, y: Any) -> None:
            super().forward(step, x, y)
            super().forward(step, x, y)
            if step == 1 and self.first(1):
                self.context.die()

    exact(world, Twice)


@pytest.mark.parametrize("transport", most(["auto"], ["tcp"]))
@pytest.mark.parametrize("where", most(["forward", "end"], ["update"]))
@pytest.mark.parametrize("at", most([0], [1, STEPS - 1]))
def test_the_first_steps_and_the_last(world: Any, at: int, where: str, transport: str) -> None:
    class Early(Script):
        ddp: ClassVar[dict[str, Any]] = {"bucket_cap_mb": 0.3}

        def make(self) -> nn.Module:
            wide = [nn.Linear(256, 256) for _ in range(3)]
            return nn.Sequential(nn.Linear(8, 256), nn.ReLU(), *wide, nn.Linear(256, 1))

        def die(self, step: int, phase: str) -> None:
            if step == at and phase == where and self.first(0):
                self.context.die()

        def forward(self, step: int, x: Any, y: Any) -> None:
            self.die(step, "forward")
            super().forward(step, x, y)
            self.die(step, "update")

        def end(self, step: int) -> None:
            self.die(step, "end")

    exact(world, Early, transport=transport)


def test_random_numbers_before_the_step(world: Any) -> None:
    class Noisy(Script):
        def before(self, step: int, x: Any) -> Any:
            noise = torch.randn_like(x)
            if step == 2 and self.first(1):
                self.context.die()
            return x + noise

    exact(world, Noisy)


def test_a_death_in_the_check_of_replicas(world: Any) -> None:
    class Checked(Script):
        def before(self, step: int, x: Any) -> Any:
            if step == 2 and self.first(1):
                self.context.die()
            if self.first(2):
                check = replicated.check_replicas

                def dies(everybody: Any, *more: Any) -> None:
                    gather = everybody.all_gather
                    everybody.all_gather = lambda *_: self.context.die()
                    check(everybody, *more)
                    everybody.all_gather = gather

                replicated.check_replicas = dies
            return x

    exact(world, Checked, died=2)


def test_a_newcomer_hands_the_state_on(world: Any) -> None:
    def training(context: Any) -> Any:
        torch.manual_seed(1)
        model = nn.Linear(4, 4)
        history, notes = [], []
        job = groups.job_of(groups.backend_of())
        job.add_listener(lambda event: event["event"] == "join-waiting" and context.mark("somebody waits"))
        while True:
            here = ftcomm.torch.join_point(model, None, {"value": model.weight[0, 0].item(), "note": 7 + len(history)})
            notes.append(here.extra["note"])
            history.append(here.step)
            if here.step == 3 and context.incarnation == 0:
                if context.rank:
                    context.die()
                context.mark("alone")
                context.hold()
            if here.step == 5:
                return history, notes[0]
            with torch.no_grad():
                model.weight += 1

    group = world.start(3, training, policy="lossy", faults="rank=0.0,at=join.transfer.source:3,do=kill")
    group.wait_ended(1)
    group.wait_ended(2)
    world.replace(group, 1)
    world.replace(group, 2)
    group.wait_for(0, "alone")
    group.wait_for(0, "somebody waits")
    group.wait_for(0, "somebody waits")
    group.release(0)
    results = group.results()
    assert [r.value for r in results if r.incarnation == 1] == [([4, 5], 11)] * 2, [r.text() for r in results]


def test_waiting_for_a_replacement_is_no_timeout(world: Any) -> None:
    """Rank 0 is in the join point's all-reduce, and does not know of the death for which the other would wait."""

    class Slow(Script):
        engine: ClassVar[dict[str, Any]] = {"patience": 1.5}

        def end(self, step: int) -> None:
            if step == 2 and self.context.rank == 1:
                self.context.die()
            if step == 2 and self.context.rank == 2:
                job, gone = groups.job_of(groups.backend_of()), threading.Event()
                job.add_listener(lambda event: event["event"] == "removed" and gone.set())
                while 1 in job.alive():
                    gone.wait(1.0)

    def patient(context: Any) -> Any:
        with pytest.raises(ftcomm.PeerFailure, match="No replacement came for rank 1"):
            Slow(context).run()

    world.values(world.start(3, patient, policy="lossy", timeout=1.0, heartbeat=0.5), dies=(1,))


class Gathering(torch.autograd.Function):
    """As SyncBatchNorm: an operation in the forward and one in the backward pass, which fail when somebody dies in them."""

    @staticmethod
    def forward(ctx: Any, x: Any, script: Any, step: int) -> Any:
        ctx.script, ctx.step = script, step
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        script = ctx.script
        if ctx.step == script.at and script.first(1):
            script.context.die()
        parts = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(parts, torch.ones(1))
        return grad, None, None


@pytest.mark.parametrize("strategy", most(["rollback"], ["replication", "lossy"]))
@pytest.mark.parametrize("at", most([1], [0, 3]))
@pytest.mark.parametrize(
    "more", [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
)
def test_an_aborted_backward_pass(world: Any, strategy: str, at: int, more: Any) -> None:
    class Aborted(Script):
        ddp: ClassVar[dict[str, Any]] = {**Script.ddp, **more}

        def make(self) -> nn.Module:
            outer = self

            class Net(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.low, self.high = nn.Linear(8, 16), net_high()

                def forward(self, x: Any) -> Any:
                    return self.high(Gathering.apply(self.low(x), outer, outer.step))

            return Net()

        def forward(self, step: int, x: Any, y: Any) -> None:
            self.step = step
            super().forward(step, x, y)

    Aborted.at, Aborted.strategy = at, strategy
    if strategy == "replication":
        exact(world, Aborted)
        return
    group = world.start(3, lambda context: Aborted(context).run(), policy="lossy")
    found = {value for value in world.values(group, dies=(1,)) if value is not None}
    assert len(found) == 1


def net_high() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 1))


@pytest.mark.parametrize(
    "more",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
    ],
)
@pytest.mark.parametrize("at", most([1], [0, 3]))
def test_settings_of_ddp(world: Any, at: int, more: Any) -> None:
    class Set(Script):
        ddp: ClassVar[dict[str, Any]] = {**Script.ddp, **more}

        def make(self) -> nn.Module:
            return (
                nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)) if "broadcast_buffers" in more else net()
            )

        def forward(self, step: int, x: Any, y: Any) -> None:
            with self.model.no_sync() if "static_graph" not in more else nullcontext():
                if "static_graph" not in more:
                    super().forward(step, x, y)
            if step == at and self.first(1):
                self.context.die()
            super().forward(step, x, y)

    exact(world, Set)


def test_misuse(world: Any) -> None:
    class Misused(Script):
        def forward(self, step: int, x: Any, y: Any) -> None:
            with self.model.no_sync() if self.how == "local" else nullcontext():
                super().forward(step, x, y)

        def update(self, step: int) -> None:
            if self.how == "closure":
                self.optimizer.step(lambda: None)
            self.optimizer.step()

        def end(self, step: int) -> None:
            if self.how == "nested":
                with self.made.step():
                    pass

    texts = []
    for how in ["closure", "local"]:
        Misused.how = how

        def misuse(context: Any) -> str:
            with pytest.raises(ftcomm.ConfigError) as caught:
                Misused(context).run()
            return str(caught.value)

        texts.append(world(2, misuse, policy="lossy"))
    assert "closure" in texts[0][0]
    assert "no_sync" in texts[1][0]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
        lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
)
def test_schedulers_are_put_back(make: Any, rate: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        model.parameters(), rate.clone() if isinstance(rate, torch.Tensor) else rate, momentum=0.9
    )
    scheduler = make(optimizer)
    restorable = Restorable(model, [optimizer], [scheduler], None)

    def state() -> str:
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        return repr((settings, scheduler.state_dict()))

    for _ in range(4):
        restorable.save()
        before, after = state(), []
        for _ in range(2):
            restorable.restore()
            assert state() == before
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            after.append(state())
        assert after[0] == after[1]


def test_a_parameter_that_only_the_dead_has_used(world: Any) -> None:
    """DDP asks in an all-reduce of its own, after those of the gradients, which parameters were used anywhere."""

    class Branches(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank, self.all, self.some = rank, nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Any) -> Any:
            return self.all(x) + self.some(x) if self.rank == 1 else self.all(x)

    class Unused(Script):
        ddp: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}

        def make(self) -> nn.Module:
            return Branches(self.context.rank)

        def forward(self, step: int, x: Any, y: Any) -> None:
            if step == 3 and self.first(1):
                gradients = self.made._kind._gradients
                average = gradients.all_reduce

                def dies(bucket: Any) -> None:
                    average(bucket)
                    gradients._works[-1].wait()
                    self.context.die()

                gradients.all_reduce = dies
            super().forward(step, x, y)

    exact(world, Unused)
