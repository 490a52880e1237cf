"""What a script does beside training: collectives of its own, exceptions that it catches, schedulers outside of the step."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from engine_script import Script, exact, kept
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import ftcomm
import ftcomm.recovery
from ftcomm.torch import join

AT = 2


class Small(Script):
    def make(self) -> nn.Module:
        return nn.Linear(8, 1)


class Guarded(Small):
    """A step whose loss is no number on some rank is left out, on all."""

    def forward(self, step: int, x: Any, y: Any) -> None:
        loss = (self.model(x) - y).square().mean()
        if step == AT and self.context.rank == 1:
            loss = loss * float("nan")
        loss.backward()
        if step == AT and self.first(1):
            self.context.die()
        self.bad = (~torch.isfinite(loss.detach())).float()
        dist.all_reduce(self.bad, dist.ReduceOp.MAX)

    def update(self, step: int) -> None:
        if not self.bad:
            self.optimizer.step()


def test_a_result_that_lacks_the_dead_is_in_no_step(world: Any) -> None:
    """Its gradients are in the averages, and its word that they are bad is not: nobody must make that update."""
    exact(world, Guarded, 2)


def test_a_group_of_its_own(world: Any) -> None:
    class Beside(Guarded):
        def run(self) -> Any:
            self.group = dist.new_group()
            return super().run()

        def forward(self, step: int, x: Any, y: Any) -> None:
            (self.model(x) - y).square().mean().backward()
            if step == AT and self.first(1):
                self.context.die()
            scale = torch.tensor(float(self.context.rank + 1))
            dist.all_reduce(scale, group=self.group)
            self.optimizer.param_groups[0]["lr"] = 0.02 * float(scale)
            self.bad = False

    exact(world, Beside, 2)


def test_only_who_asks_something_pays_for_it(world: Any) -> None:
    class Counted(Small):
        def after(self, step: int) -> None:
            if step < AT:
                dist.barrier()  # not in the step

        def end(self, step: int) -> None:
            self.counts.append(join.everybody(self.model).stats()["operations"])

        def forward(self, step: int, x: Any, y: Any) -> None:
            super().forward(step, x, y)
            if step > 3:
                dist.all_reduce(torch.ones(1))

        def run(self) -> Any:
            self.counts: list[int] = []
            super().run()
            return [after - before for before, after in zip(self.counts, self.counts[1:], strict=False)]

    assert world(2, lambda context: Counted(context).run(), policy="lossy") == [[1, 1, 1, 2, 2]] * 2


def test_a_result_after_the_update_that_lacks_the_dead_is_a_warning(world: Any) -> None:
    class Told(Small):
        def update(self, step: int) -> None:
            super().update(step)
            if step == AT and self.first(1):
                self.context.die()
            dist.all_reduce(torch.ones(1))

        def run(self) -> Any:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                super().run()
            return self.context.rank, tuple(str(one.message) for one in told if "collective" in str(one.message))

    values, _ = kept(world, Told, 3)
    texts = dict(values)
    assert [len(texts[rank]) for rank in range(3)] == [1, 0, 1]
    assert texts[0][0].startswith("Rank 1 died, and a collective of the script's")


class Caught(Script):
    """An exception leaves a step, on all ranks, and is caught in the loop."""

    def around(self) -> Any:
        return suppress(ArithmeticError)

    def before(self, step: int, x: Any) -> Any:
        self.optimizer.zero_grad()
        return x

    def update(self, step: int) -> None:
        if step == AT:
            if self.first(0):
                self.context.die()
            raise ArithmeticError
        super().update(step)


def test_a_step_that_an_exception_has_left_is_decided_as_any_other(world: Any) -> None:
    """Rank 0 has the buffers that all get."""

    class Asked(Caught):
        def after(self, step: int) -> None:
            assert self.made.committed == (step != AT)

    exact(world, Asked, 2)


def test_an_exception_in_a_pass(world: Any) -> None:
    """Before its first average it can be done without; after it there is no way on."""

    class Passed(Caught):
        late = False

        def forward(self, step: int, x: Any, y: Any) -> None:
            layers = list(self.model.module)
            handle = layers[0 if self.late else -1].register_full_backward_hook(self.hook) if step == AT else None
            try:
                super().forward(step, x, y)
            finally:
                if handle is not None:
                    handle.remove()

        def hook(self, *_: Any) -> None:
            raise ArithmeticError

        def update(self, step: int) -> None:
            self.optimizer.step()

    class Late(Passed):
        late = True

    def late(context: Any) -> str:
        with pytest.raises(ftcomm.ConfigError) as caught:
            Late(context).run()
        return str(caught.value)

    values = world(2, lambda context: Passed(context).run(), policy="lossy")
    assert values[0] == values[1]
    assert all("in the middle of the backward pass" in text for text in world(2, late, policy="lossy"))


def test_a_scheduler_outside_of_the_step(world: Any) -> None:
    """It would be stepped twice for a step that is done again."""

    class Outside(Small):
        def forward(self, step: int, x: Any, y: Any) -> None:
            if step == AT and self.first(1):
                self.context.die()
            super().forward(step, x, y)

        def after(self, step: int) -> None:
            if not step:
                self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.9)
            self.scheduler.step()

    def outside(context: Any) -> str:
        with pytest.raises(ftcomm.ConfigError) as caught:
            Outside(context).run()
        return str(caught.value)

    values = world.values(world.start(3, outside, policy="lossy"), dies=(1,))
    assert all("Step schedulers inside" in values[rank] for rank in (0, 2))


class Rows:
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(torch.ones(self.batches, 4, 8))


@pytest.mark.parametrize(("batches", "epochs"), [((3, 4), (2, 2)), ((3, 3), (1, 2))])
def test_who_has_more_steps_than_others_is_told(world: Any, batches: Any, epochs: Any) -> None:
    def uneven(context: Any) -> Any:
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = ftcomm.recovery.Engine(model, optimizer)
        with pytest.raises(ftcomm.Mismatch, match="same number of batches"):
            for _, x in engine.steps(Rows(batches[context.rank]), epochs=epochs[context.rank]):
                with engine.step():
                    model(x).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return engine.step_number

    assert world(2, uneven, policy="lossy") == [3, 3]


@pytest.mark.parametrize("where", ["forward", "end"])
def test_gradients_that_are_zero_between_steps(world: Any, where: str) -> None:
    """A step that does not use a parameter moves it all the same, by its momentum: if it has a gradient."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Any, both: bool) -> Any:
            return self.left(x) + self.right(x) if both else self.left(x)

    class Zeroed(Script):
        ddp: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}
        set_to_none = False

        def make(self) -> nn.Module:
            return Branch()

        def forward(self, step: int, x: Any, y: Any) -> None:
            if where == "forward" and step == 3 and self.first(1):
                self.context.die()
            (self.model(x, step % 2 == 0) - y).square().mean().backward()

        def end(self, step: int) -> None:
            if where == "end" and step == 2 and self.first(1):
                self.context.die()

    exact(world, Zeroed, 2)


def test_each_rank_may_have_buffers_of_its_own(world: Any) -> None:
    """Then they are no sign that replicas differ."""

    class Own(Script):
        ddp: ClassVar[dict[str, Any]] = {**Script.ddp, "broadcast_buffers": False}

        def forward(self, step: int, x: Any, y: Any) -> None:
            if step == AT and self.first(1):
                self.context.die()
            super().forward(step, x, y)

        def run(self) -> Any:
            super().run()
            return tuple(parameter.sum().item() for parameter in self.model.parameters()), self.made.step_number

    exact(world, Own, 2)


def test_who_leaves_the_loop_after_a_dropped_step_is_told(world: Any) -> None:
    def run(context: Any) -> list[str]:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = ftcomm.recovery.Engine(model, optimizer, "rollback")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(48, 8)), batch_size=4)):
                with engine.step():
                    loss = model(x).square().mean()
                    if step == AT and context.rank == 1:
                        context.die()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if step == AT:
                    break
        return [str(one.message) for one in told if "left after" in str(one.message)]

    (texts, _) = world(2, run, dies=(1,), policy="lossy")
    assert len(texts) == 1
    assert texts[0].startswith(f"The loop was left after step {AT}, which was dropped")
    assert "`if engine.committed and ...: break`" in texts[0]


def test_another_number_of_ranks_is_refused(world: Any, tmp_path: Any) -> None:
    def run(context: Any) -> None:
        model = DistributedDataParallel(nn.Linear(8, 1))
        engine = ftcomm.recovery.Engine(model, torch.optim.SGD(model.parameters(), 0.1), checkpoint_dir=tmp_path)
        for _, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(24, 8)), batch_size=4)):
            with engine.step():
                model(x).sum().backward()

    def fewer(context: Any) -> str:
        with pytest.raises(ftcomm.ConfigError) as caught:
            run(context)
        return str(caught.value)

    world(3, run, policy="lossy")
    for text in world(2, fewer, policy="lossy"):
        assert text.startswith(f"The run can't go on from the checkpoint of step 2 in {tmp_path}. ")
        assert "Deal the data out to 3 ranks again. Or give another checkpoint_dir" in text


def test_parameters_that_are_frozen_after_wrapping(world: Any) -> None:
    """Who has come in has not frozen them when its buckets are made."""

    class Frozen(Script):
        ddp: ClassVar[dict[str, Any]] = {**Script.ddp, "find_unused_parameters": True}

        def make(self) -> nn.Module:
            return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1))

        def before(self, step: int, x: Any) -> Any:
            for parameter in self.model.module[0].parameters():
                parameter.requires_grad_(step == 0)
            return x

        def forward(self, step: int, x: Any, y: Any) -> None:
            if step == 3 and self.first(1):
                self.context.die()
            super().forward(step, x, y)

    exact(world, Frozen, 2)
