"""What is true between two steps: of gradients, of schedulers and settings, of the place in the data."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import ftcomm
from ftcomm.recovery import Engine
from ftcomm.recovery.data import make_source
from ftcomm.recovery.engine.between_steps import BetweenSteps
from ftcomm.recovery.engine.schedules import Schedules
from ftcomm.recovery.engine.staged import Staged


def two() -> tuple[Any, Any]:
    """A module, and an optimizer of its last layer."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return net, torch.optim.SGD(net[1].parameters(), 0.1, momentum=0.9)


def test_who_comes_in_has_zeros_where_the_others_have_gradients() -> None:
    net, optimizer = two()
    net[1].bias.grad = torch.ones(1)
    state = BetweenSteps(net, optimizer).state_dict()
    other, theirs = two()
    other(torch.ones(1, 2)).sum().backward()
    BetweenSteps(other, theirs).load_state_dict(state)
    assert [parameter.grad is not None for parameter in other.parameters()] == [False, False, False, True]
    assert other[1].bias.grad.tolist() == [0.0]


def test_a_gradient_that_the_optimizer_does_not_clear() -> None:
    net, optimizer = two()
    between = BetweenSteps(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        between.warn()
        net[1].weight.grad = torch.ones(1, 2)
        net[0].weight.grad = torch.zeros(2, 2)
        between.warn()
        net[0].weight.grad += 1
        optimizer.add_param_group({"params": net[0].weight})
        between.warn()
    net[0].bias.grad = torch.ones(2)
    with pytest.warns(RuntimeWarning, match="Parameter '0.bias' is not in the optimizer"):
        between.warn()


def test_such_a_gradient_is_not_used_up_by_an_update() -> None:
    """A replica's state without it is not that of the step's begin."""
    net, optimizer = two()
    net(torch.ones(1, 2)).sum().backward()
    staged: Any = SimpleNamespace(_model=net, _setup=SimpleNamespace(optimizer=optimizer), _used={})
    Staged._updated(staged)
    assert [now == used for _, now, used in Staged._gradients_since(staged)] == [False, False, True, True]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1), float("nan")])
def test_schedules_that_are_left_alone(rate: Any) -> None:
    _, optimizer = two()
    scheduler = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)], [2]
    )
    optimizer.param_groups[0]["lr"] = rate
    kept = Schedules(optimizer, [scheduler])
    kept.check()
    kept.keep()
    kept.check()
    kept.check(last=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, _: optimizer.param_groups[0].update(weight_decay=0.1),
        lambda optimizer, _: optimizer.param_groups[0]["lr"].mul_(2),
        lambda _, scheduler: scheduler.step(1.0),
    ],
)
def test_schedules_that_are_changed_before_the_repetition(change: Any) -> None:
    _, optimizer = two()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    kept = Schedules(optimizer, [scheduler])
    kept.keep()
    change(optimizer, scheduler)
    with pytest.raises(ftcomm.ConfigError, match="inside of"):
        kept.check()
    with pytest.raises(ftcomm.ConfigError, match="inside of"):
        kept.check(last=True)
    change(optimizer, scheduler)
    kept.check()


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(TensorDataset(torch.arange(4)), 2)])
def test_the_place_in_the_data_grows(loader: Any) -> None:
    source = make_source(loader, 0, 1, keep_batch=False)
    places = []
    for _ in range(2):
        while True:
            places.append(source.place(2))
            if source.draw([0]) is None:
                break
            source.commit([0])
        source.next_epoch()
    assert [*places, source.place(2)] == [0, 0, 1, 3, 3, 5, 8]


def run(extra: dict[str, Any], folder: Path) -> Engine:
    net, _ = two()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    engine = Engine(net, optimizer, "checkpoint", folder, extra=extra)
    for step, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(6, 2)), 2)):
        with engine.step():
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        extra["last"] = step
    return engine


def test_the_scripts_own_dictionary_is_the_one_that_is_kept(tmp_path: Path) -> None:
    mine, again = {"last": -1}, {"last": -1}
    assert run(mine, tmp_path).extra is mine
    assert mine == {"last": 2}
    engine = run(again, tmp_path)
    assert again == {"last": 2}
    assert [parameter.grad.tolist() for parameter in engine.model[1].parameters()] == [[[0.0, 0.0]], [0.0]]
    with pytest.raises(ftcomm.ConfigError, match="strings"):
        run({1: 2}, tmp_path)  # type: ignore[dict-item]
