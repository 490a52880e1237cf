"""Accumulating gradients over several engine steps is warned of: a death would lose them."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import ftcomm.recovery  # noqa: E402


def run(updates: set[int], clears: set[int], scaler: bool = False) -> list[str]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    more = {"scaler": torch.amp.GradScaler("cpu")} if scaler else {}
    engine = ftcomm.recovery.Engine(model, optimizer, **more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(16, 2)), 4)):
            with engine.step():
                model(x).sum().backward()
                if step in updates:
                    optimizer.step()
                if step in clears:
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


def test_a_step_that_leaves_gradients_is_warned_of_once() -> None:
    (text,) = run({1, 3}, {1, 3})
    assert "put all micro-batches of an update" in text


@pytest.mark.parametrize(("updates", "clears"), [({0, 1, 2, 3}, set()), ({1}, {0, 1, 2, 3}), (set(), {0, 1, 2, 3})])
def test_a_step_that_leaves_none_is_not(updates: set[int], clears: set[int]) -> None:
    assert run(updates, clears) == []


def test_with_a_scaler_it_is_not() -> None:
    assert run({3}, set(), scaler=True) == []
