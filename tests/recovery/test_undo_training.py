"""Undo in a training loop: GradScaler with steps it skips, clipping, and a scheduler, with every optimizer."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import undo_cases as cases  # noqa: E402

from ftcomm.errors import ConfigError  # noqa: E402
from ftcomm.recovery import Undo  # noqa: E402

one_thread = cases.one_thread  # a fixture of every test here

STEPS = 6


def near(one: Any, other: Any, exact: bool) -> None:
    if exact:
        assert cases.same(one, other)
    else:
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def is_as_before(before: Any, optimizer: Any, exact: bool) -> None:
    """All but the learning rates, which a scheduler may have changed."""
    now = cases.picture(optimizer)
    for picture in (before, now):
        for group in picture[1]["param_groups"]:
            group.pop("lr", None)
    near(now, before, exact)


def train(name: str, variant: dict[str, Any], clipped: bool, undone: bool, exact: bool) -> Any:
    """Steps with a scaled loss; with ``undone`` each of them is made, undone, and made again. Returns what came out."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    draw = random.Random(2)
    groups = [{"params": list(model[at].parameters()), **cases.settings(name, draw, plain=True)} for at in (0, 2)]
    optimizer = cases.cls(name)(groups, **variant)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    undo = Undo(optimizer, exact=exact) if undone else None
    # torch's fused SGD keeps a momentum buffer that nobody has filled if its first step is skipped.
    skipped = (1, 3) if (name, variant) == ("SGD", {"fused": True}) else (0, 3)
    for step in range(STEPS):
        data = torch.randn(3, 4, dtype=torch.float64)

        def loss(data: Any = data, factor: float = float("inf") if step in skipped else 1.0) -> Any:
            optimizer.zero_grad()
            return model(data).pow(2).mean() * factor

        scaler.scale(loss()).backward()
        if clipped:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        before = cases.picture(optimizer)
        scaler.step(optimizer)
        after = cases.picture(optimizer)
        scaler.update()
        if step in skipped:
            assert cases.same(before[0], after[0])
            # State that a fused first step makes stays.
            assert step == 0 or cases.same(before, after)
            if undo is not None:
                assert undo.updated == []
                with pytest.raises(ConfigError, match="nothing to undo"):
                    undo.undo()
            continue
        assert not cases.same(before[0], after[0])
        if undo is not None:
            assert undo.updated == list(model.parameters())
            undo.undo()
            is_as_before(before, optimizer, exact)
            loss().backward()  # the scale is a power of two: these are the same gradients
            if clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            undo.forget()
        scheduler.step()
    return cases.picture(optimizer)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(("name", "variant", "exact"), cases.exact_and_plain(), ids=cases.case_id)
@pytest.mark.sample(30)
def test_scaled_steps_and_skipped_ones(name: str, variant: dict[str, Any], exact: bool, clipped: bool) -> None:
    with_undo = train(name, variant, clipped, True, exact)
    near(with_undo, train(name, variant, clipped, False, exact), exact)


@pytest.mark.parametrize(("name", "variant", "exact"), cases.exact_and_plain(), ids=cases.case_id)
@pytest.mark.sample(16)
def test_a_learning_rate_is_the_schedulers(name: str, variant: dict[str, Any], exact: bool) -> None:
    """The step is undone with its own rate, and the scheduler's stays."""
    optimizer = cases.make(name, 6, seed=11, dtype=torch.float64, plain=True, **variant)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    undo = Undo(optimizer, exact=exact)
    for number in range(4):
        cases.gradients(optimizer, seed=12 + number, plain=True, missing=0)
        torch.nn.utils.clip_grad_norm_(cases.parameters(optimizer), 0.5)
        before, was = cases.picture(optimizer), rates(optimizer)
        optimizer.step()
        scheduler.step()
        now = rates(optimizer)
        assert now != was
        undo.undo()
        assert rates(optimizer) == now
        is_as_before(before, optimizer, exact)
        cases.gradients(optimizer, seed=12 + number, plain=True, missing=0)
        optimizer.step()
