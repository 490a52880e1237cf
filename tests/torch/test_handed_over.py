"""What a replacement gets of the state: its layout, its types, what modules keep besides tensors."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from kept import Kept
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ftcomm
import ftcomm.recovery
from ftcomm.torch import join
from ftcomm.torch.blocks import Blocks
from ftcomm.torch.modules import ddp_of, unwrapped
from ftcomm.torch.state import TrainingState

GENERATOR = torch.Generator().manual_seed(3)
DATA = TensorDataset(torch.randn(48, 48, generator=GENERATOR), torch.randn(48, 1, generator=GENERATOR))


class Counting(nn.Module):
    """Counts its passes in its extra state, and keeps a mean in a buffer that it assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.weights = 0, torch.zeros(2)
        self.register_buffer("mean", torch.zeros(48))

    def forward(self, x: Any) -> Any:
        self.seen += 1
        self.weights += 0.5
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return (x - self.mean) * min(1.0, self.seen / 10)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "weights": self.weights}

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.weights = state["seen"], state["weights"]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()]
    return nn.Sequential(Counting(), *layers, nn.Linear(16, 1)).to(memory_format=torch.channels_last)


def update(model: Any, optimizer: Any) -> None:
    x, y = DATA[:4]
    (model(x.to(model[-1].weight.dtype)) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def hand_over(source: TrainingState, target: TrainingState, step: int = 0) -> dict[str, Any]:
    """As between two processes."""
    target.expect(source.pack({"step": step}))
    of, to = Blocks(source.tensors, source.own), Blocks(target.tensors, target.own)
    for number in range(len(of.plan)):
        room = to.room(number)
        room.copy_(of.read(number))
        to.put(number, room)
    to.finish()
    return target.load()[0]


def trained(kind: Any, steps: int = 2, dtype: Any = torch.float32, **how: Any) -> tuple[Any, Any]:
    model = net().to(dtype)
    optimizer = kind(model.parameters(), 0.01, **how)
    for _ in range(steps):
        update(model, optimizer)
    return model, optimizer


def states(optimizer: Any) -> list[dict[str, Any]]:
    return [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def test_optimizer_state_keeps_its_strides() -> None:
    """A fused update goes through parameter and state in the order of memory."""
    (model, ours), (other, theirs) = (trained(torch.optim.AdamW, steps, fused=True) for steps in (2, 0))
    hand_over(TrainingState(model, ours, None), TrainingState(other, theirs, None))
    assert not model[2].weight.is_contiguous()
    for mine, its in zip(states(ours), states(theirs), strict=True):
        assert {name: value.stride() for name, value in mine.items()} == {n: v.stride() for n, v in its.items()}
    update(model, ours)
    update(other, theirs)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    "odd",
    [
        torch.arange(3.0).reshape(3, 1).expand(3, 4),
        torch.arange(10.0).as_strided((3, 4), (2, 1)),
        torch.arange(24.0).reshape(6, 4)[::2],
        torch.arange(12.0).reshape(4, 3).t(),
        torch.empty(0, 3),
    ],
    ids=["expanded", "overlapping", "with gaps", "transposed", "empty"],
)
def test_each_element_of_what_comes_has_a_place_of_its_own(odd: torch.Tensor) -> None:
    module = nn.Linear(1, 1)
    source, target = TrainingState(module, None, {"odd": odd}), TrainingState(module, None, {"odd": None})
    target.expect(source.pack({"step": 0}))
    (came,) = target.tensors[2:]
    assert came.shape == odd.shape
    assert came.untyped_storage().nbytes() == came.nbytes
    assert came.stride() == torch.empty_like(odd).stride()
    came.fill_(1)
    again = TrainingState(module, None, {"odd": came})
    again.pack({"step": 0})
    assert again.digest == source.digest  # who has got it gives it away together with those who had it


def test_memory_of_another_layout_is_not_used_again() -> None:
    """Else what comes from one that has another layout would stay in the first one's."""
    module, square = nn.Linear(1, 1), torch.arange(16.0).reshape(4, 4)
    digests = set()
    target = TrainingState(module, None, {"square": None})
    for value in (square, square.t()):
        source = TrainingState(module, None, {"square": value})
        target.expect(source.pack({"step": 0}))
        digests.add(source.digest)
        assert target.tensors[2].stride() == value.stride()
    assert len(digests) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_optimizer_state_keeps_its_types(kind: Any, dtype: torch.dtype) -> None:
    """torch gives all of it its parameter's when it loads it."""
    (model, ours), (other, theirs) = (trained(kind, steps, dtype) for steps in (2, 0))
    hand_over(TrainingState(model, ours, None), TrainingState(other, theirs, None))
    odd = 0
    for mine, its in zip(states(ours), states(theirs), strict=True):
        for name, value in mine.items():
            assert (its[name].dtype, its[name].device) == (value.dtype, value.device)
            assert torch.equal(its[name], value)
            odd += name != "step" and value.dtype != dtype
    assert odd


def test_extra_state_of_modules_is_handed_over() -> None:
    (model, _), (other, _) = (trained(torch.optim.SGD, steps) for steps in (3, 0))
    hand_over(TrainingState(model, None, None), TrainingState(other, None, None))
    assert other[0].seen == 3
    assert other[0].weights.tolist() == [1.5, 1.5]
    model[0].weights += 1
    assert other[0].weights.tolist() == [1.5, 1.5]


def test_dictionaries_stay_what_they_are() -> None:
    """A scheduler counts on its Counter, load_state_dict() on the versions in its OrderedDict."""
    counter, lists = collections.Counter(a=2), collections.defaultdict(list, b=[torch.ones(2)])
    ordered, odd = nn.BatchNorm1d(2).state_dict(), collections.defaultdict(lambda: 0, c=3)
    module = nn.Linear(1, 1)
    target = TrainingState(module, None, {})
    extra = hand_over(TrainingState(module, None, {"a": counter, "b": lists, "c": ordered, "d": odd}), target)
    assert extra["a"]["none"] == 0
    assert extra["a"] == counter
    assert extra["b"]["none"] == []
    assert extra["b"]["b"][0].tolist() == [1, 1]
    assert extra["c"]._metadata == ordered._metadata
    assert [*extra["c"]] == [*ordered]
    assert extra["d"] == {"c": 3}  # its default can't be sent
    assert counter == {"a": 2}


def test_schedulers_that_count_are_handed_over() -> None:
    def made() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
        parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])]
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])

    (ours, rates), (theirs, others) = made(), made()
    ours.step()
    rates.step()
    module = nn.Linear(1, 1)
    hand_over(TrainingState(module, ours, {"rates": rates}), TrainingState(module, theirs, {"rates": others}))
    for _ in range(6):
        for optimizer, scheduler in ((ours, rates), (theirs, others)):
            optimizer.step()
            scheduler.step()
        assert rates.get_last_lr() == others.get_last_lr()


class Reducing(nn.Module):
    """Not a DistributedDataParallel, for all its attribute's name."""

    def __init__(self) -> None:
        super().__init__()
        self.reducer, self.module = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.module(self.reducer(x))


def test_a_module_with_a_reducer_of_its_own_is_handed_over(world: Any) -> None:
    def shared(context: Any) -> Any:
        torch.manual_seed(context.rank)
        model = Reducing()
        join.share(model, None, None, context.rank == 0)
        return [parameter.sum().item() for parameter in model.parameters()]

    ours, theirs = world(2, shared, policy="lossy")
    assert len(ours) == 4
    assert ours == theirs


def test_a_compiled_model_is_still_a_distributed_one(world: Any) -> None:
    """Its buckets have to be made anew, and its hooks' random numbers handed over, as without torch.compile."""

    def told(context: Any) -> Any:
        replicas = DistributedDataParallel(nn.Linear(2, 2))
        compiled = torch.compile(replicas)
        others = [nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)), Reducing()]
        found = [ddp_of(model) is replicas for model in (replicas, compiled)]
        found += [unwrapped(model) is replicas.module for model in (replicas, compiled)]
        return found + [ddp_of(model) is None and unwrapped(model) is model for model in others]

    assert all(world(1, told)[0])


@pytest.mark.parametrize(("policy", "saved"), [("lossy", False), ("raise", True), ("replay", True)])
def test_parameters_that_are_not_the_models_are_refused(world: Any, tmp_path: Any, policy: str, saved: bool) -> None:
    """Nobody would hand them over, compare or save them."""

    def refused(context: Any) -> str:
        replicas, scale = DistributedDataParallel(nn.Linear(2, 2)), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([{"params": replicas.parameters()}, {"params": [scale]}], 0.1)
        with pytest.raises(ftcomm.ConfigError) as caught:
            ftcomm.recovery.Engine(replicas, optimizer, checkpoint_dir=tmp_path if saved else None)
        if policy == "replay":
            ftcomm.recovery.Engine(replicas, optimizer)  # who dies does all again
        return str(caught.value)

    for text in world(2, refused, policy=policy):
        assert text.startswith("The optimizer's parameter 2 (shape [3]) is not in the model")
        assert "Make it a parameter of the model" in text


def training(context: Any, kind: Any, dtype: Any, phase: str, **how: Any) -> Any:
    model, optimizer = trained(kind, 0, dtype, **how)
    replicas = DistributedDataParallel(model)
    engine = ftcomm.recovery.Engine(replicas, optimizer, strategy="replication")
    for step, (x, y) in engine.steps(DataLoader(DATA, batch_size=4, shuffle=True)):
        armed = step == 3 and context.rank == 1 and context.incarnation == 0
        with engine.step():
            loss = (replicas(x.to(dtype)) - y.to(dtype)).square().mean()
            if armed and phase == "forward":
                context.die()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if armed and phase == "after":
            context.die()
    return [parameter.double().sum().item() for parameter in model.parameters()], model[0].seen, model[0].mean.tolist()


@pytest.mark.parametrize(
    ("kind", "dtype", "how"),
    [(torch.optim.AdamW, torch.float32, {"fused": True}), (torch.optim.NAdam, torch.bfloat16, {})],
    ids=["fused", "types"],
)
def test_nothing_of_a_death_is_left(world: Any, kind: Any, dtype: torch.dtype, how: dict[str, Any]) -> None:
    wanted = world(2, lambda context: training(context, kind, dtype, "", **how), policy="lossy")
    assert wanted[0] == wanted[1]
    for phase in ("forward", "after"):
        job = Kept(world, lambda context, phase=phase: training(context, kind, dtype, phase, **how), 2)
        assert job.values() == wanted
        assert job.incarnation == [0, 1]


def with_groups_kept(context: Any, rate: Any, odd: bool = False) -> Any:
    """A script that has taken hold of the optimizer's groups before the loop, and sets their rates by hand."""
    torch.manual_seed(1)
    replicas = DistributedDataParallel(nn.Linear(48, 1))
    lr = rate()
    optimizer = torch.optim.SGD(replicas.parameters(), lr, foreach=False)
    engine = ftcomm.recovery.Engine(replicas, optimizer, strategy="replication")
    groups, (group,) = optimizer.param_groups, optimizer.param_groups
    for step, (x, y) in engine.steps(DataLoader(DATA, batch_size=2)):
        if isinstance(lr, torch.Tensor):
            lr.fill_(0.1 / (1 + step))
        else:
            group["lr"] = 0.1 / (1 + step)
        groups[0]["weight_decay"] = 0.5 if odd and context.incarnation else 0.01 * step
        if step == 3 and context.rank == 1 and context.incarnation == 0:
            context.die()
        with engine.step():
            (replicas(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.tolist() for parameter in replicas.parameters()], engine.progress.joined


@pytest.mark.parametrize("rate", [lambda: 0.1, lambda: torch.tensor(0.1)], ids=["number", "tensor"])
def test_groups_that_the_script_keeps_stay_the_optimizers(world: Any, rate: Any) -> None:
    ours, theirs = Kept(world, lambda context: with_groups_kept(context, rate), 2).values()
    assert ours == theirs
    assert ours[1] == 1


def test_who_comes_in_and_trains_with_other_settings_is_found_a_step_later(world: Any) -> None:
    def differs(context: Any) -> str:
        with pytest.raises(ftcomm.Mismatch) as caught:
            with_groups_kept(context, lambda: 0.1, odd=True)
        return str(caught.value)

    for text in Kept(world, differs, 2).values():
        assert "parameter weight on rank 1 differs from rank 0's" in text
