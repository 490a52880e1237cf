"""Plain undo: how far off it is, and that it says so where it cannot be had."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import undo_cases as cases  # noqa: E402
from tables import most  # noqa: E402

from ftcomm.errors import ConfigError  # noqa: E402
from ftcomm.recovery import Undo  # noqa: E402

one_thread = cases.one_thread  # a fixture of every test here


def tensors(picture: Any) -> dict[str, Any]:
    """All values of each kind, a row for each parameter: one comparison of a thousand is quicker than a thousand of one."""
    found: dict[str, list[Any]] = {"p": list(picture[0])}
    for at in sorted(picture[1]["state"]):
        for name, value in picture[1]["state"][at].items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: torch.stack(values).double().reshape(len(values), -1) for name, values in found.items()}


def far(before: Any, after: Any, now: Any) -> dict[str, float]:
    """Largest error of each kind of value, over the largest of it before and after the step and 1 % of its tensor's largest."""
    was, later, found = tensors(before), tensors(after), tensors(now)
    assert (
        {k: v.shape for k, v in was.items()}
        == {k: v.shape for k, v in found.items()}
        == {k: later[k].shape for k in was}
    )
    worst = {}
    for name, value in was.items():
        scale = torch.maximum(value.abs(), later[name].abs())
        scale = scale.maximum(scale.amax(1, keepdim=True) * 0.01).clamp(min=1e-300)
        worst[name] = ((found[name] - value).abs() / scale).max().item()
    return worst


@pytest.mark.parametrize(("name", "variant"), cases.variants(cases.PLAIN), ids=cases.case_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("number", cases.NUMBERS)
def test_the_error_is_of_rounding_only(place: Any, name: str, variant: dict[str, Any], dtype: Any, number: int) -> None:
    cases.check(name, variant, place.device)
    place(lambda device: rounded(name, variant, dtype, device, number))


def rounded(name: str, variant: dict[str, Any], dtype: Any, device: str, number: int) -> None:
    for seed, optimizer in cases.batches(name, 21, number, dtype=dtype, plain=True, device=device, **variant):
        undo = Undo(optimizer, exact=False)
        cases.steps(optimizer, 2, seed=seed, plain=True, missing=0)
        cases.gradients(optimizer, seed=seed + 99, plain=True)
        before = cases.picture(optimizer)
        optimizer.step()
        after = cases.picture(optimizer)
        assert not cases.same(before, after)
        undo.undo()
        now = cases.picture(optimizer)
        worst = far(before, after, now)
        # One rounding of the step, over the smallest beta (0.5) or what weight decay leaves, and one of the inverse; RMSprop
        # and Adagrad divide by a root of what the step made.
        assert max(worst.values()) < 64 * torch.finfo(dtype).eps, worst
        assert worst.get("step", 0.0) == 0
        assert worst.get("mu_product", 0.0) == 0
        for kind, value in tensors(now).items():
            if kind in ("exp_avg_sq", "square_avg", "sum"):
                assert (value >= 0).all()
        assert cases.same(before[1]["param_groups"], now[1]["param_groups"])


FACTORS = {0.0: "zero", 1e-39: "subnormal", 1e10: "large", 1e37: "huge"}


@pytest.mark.parametrize("factor", most([1e-39, 1e37], FACTORS), ids=FACTORS.get)
@pytest.mark.parametrize("name", cases.PLAIN)
@pytest.mark.sample(9)
def test_gradients_that_are_not_ordinary(name: str, factor: float) -> None:
    """Off by roundings of the larger of before and after, of which nothing need be left of before; or refused."""
    # Squares of huge ones are not finite; SGD has no squares, and those of Lars and Lamb make all of their steps zero.
    refuses = factor == 1e37 and name not in ("SGD", "Lars", "Lamb")
    for seed, optimizer in cases.batches(name, 31, 10, plain=True):
        undo = Undo(optimizer, exact=False)
        cases.steps(optimizer, 2, seed=seed, plain=True, missing=0)
        cases.gradients(optimizer, seed=seed + 99, plain=True, missing=0)
        for p in cases.parameters(optimizer):
            p.grad.mul_(factor)
        before = cases.picture(optimizer)
        optimizer.step()
        after = cases.picture(optimizer)
        if refuses:
            with pytest.raises(ConfigError, match=r"not finite.*exact=True"):
                undo.undo()
            assert cases.same(after, cases.picture(optimizer))
            continue
        undo.undo()
        worst = far(before, after, cases.picture(optimizer))
        assert max(worst.values()) < 64 * torch.finfo(torch.float32).eps, worst


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_short_types(name: str, dtype: Any) -> None:
    # float16 has no room for eps=1e-8 or squares of small gradients: what torch itself computes there is not finite.
    more = {} if name == "SGD" else {"eps": 1e-3}
    optimizer = cases.make(name, 200, seed=24, dtype=dtype, plain=True, **more)
    undo = Undo(optimizer, exact=False)
    cases.steps(optimizer, 2, seed=25, plain=True)
    cases.gradients(optimizer, seed=26, plain=True)
    before = cases.picture(optimizer)
    optimizer.step()
    after = cases.picture(optimizer)
    undo.undo()
    made = {k: v for k, v in after[1]["state"].items() if k in before[1]["state"]}
    worst = far(before, (after[0], {"state": made}), cases.picture(optimizer))
    assert max(worst.values()) < 64 * torch.finfo(dtype).eps, worst


def test_the_settings_of_the_step_count() -> None:
    optimizer = cases.make("AdamW", 100, seed=27, dtype=torch.float64, plain=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.03, dtype=torch.float64)
    undo = Undo(optimizer, exact=False)
    cases.gradients(optimizer, seed=28, plain=True, missing=0)
    before = cases.picture(optimizer)
    optimizer.step()
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(7.0)
        else:
            group["lr"] = 7.0
        group["betas"], group["weight_decay"], group["maximize"] = (0.6, 0.6), 0.5, not group["maximize"]
    undo.undo()
    for p, was in zip(cases.parameters(optimizer), before[0], strict=True):
        torch.testing.assert_close(p.detach(), was, rtol=1e-13, atol=1e-13)


def test_rounding_never_makes_a_second_moment_negative() -> None:
    p = torch.nn.Parameter(torch.zeros(20000))
    optimizer = torch.optim.Adam([p], betas=(0.9, 0.5))
    undo = Undo(optimizer, exact=False)
    gen = torch.Generator().manual_seed(1)
    for scale in (1e-9, 1.0):
        p.grad = torch.randn(20000, generator=gen) * scale
        optimizer.step()
    undo.undo()
    assert (optimizer.state[p]["exp_avg_sq"] >= 0).all()


def test_memory_is_of_counters_only() -> None:
    p = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([p])
    undo = Undo(optimizer, exact=False)
    for _ in range(3):
        p.grad = torch.ones(1000)
        optimizer.step()
    assert undo.memory() == 4


def stepped(exact: bool = False) -> Any:
    p, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([p, other])
    undo = Undo(optimizer, exact=exact)
    p.grad = torch.full((3,), 0.5)
    optimizer.step()
    return p, other, optimizer, undo


def test_gradients_that_are_gone_or_changed() -> None:
    for spoil, text in (
        (lambda p, o: o.zero_grad(), "is gone since the step"),
        (lambda p, o: o.zero_grad(set_to_none=False), "was replaced or changed since the step"),
        (lambda p, o: p.grad.mul_(1), "was replaced or changed since the step"),
        (lambda p, o: setattr(p, "grad", p.grad.clone()), "was replaced or changed since the step"),
        (lambda p, o: (p * p).sum().backward(), "was replaced or changed since the step"),
    ):
        p, _, optimizer, undo = stepped()
        spoil(p, optimizer)
        was = p.detach().clone()
        with pytest.raises(ConfigError, match=f"{text}.*exact=True"):
            undo.undo()
        assert cases.same(p.detach(), was)


def test_anything_else_that_changed() -> None:
    p, _, optimizer, undo = stepped()
    with torch.no_grad():
        p.add_(1)
    with pytest.raises(ConfigError, match="something else changed"):
        undo.undo()
    p, _, optimizer, undo = stepped()
    optimizer.state[p]["exp_avg"].zero_()
    with pytest.raises(ConfigError, match="something else changed"):
        undo.undo()


def test_what_is_not_finite() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=1.0)
    undo = Undo(optimizer, exact=False)
    p.grad = torch.tensor([1.0, float("inf"), 1.0])
    optimizer.step()
    with pytest.raises(ConfigError, match=r"not finite.*exact=True"):
        undo.undo()


def test_weight_decay_that_leaves_nothing() -> None:
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.RMSprop([p], lr=0.1, weight_decay=0.1, alpha=0.5, eps=1e-8)
    undo = Undo(optimizer, exact=False)
    p.grad = torch.tensor([0.01 * 2**0.5 - 0.1], dtype=torch.float64)  # root of the average: lr * weight_decay
    optimizer.step()
    with pytest.raises(ConfigError, match=r"too little to tell it.*exact=True"):
        undo.undo()


def test_an_interrupted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    p, _, optimizer, undo = stepped()
    monkeypatch.setattr(torch.Tensor, "addcdiv_", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert undo.updated == []
    for params in (None, [p]):
        with pytest.raises(ConfigError, match=r"interrupted in its middle.*exact=True\) can"):
            undo.undo(params)


def test_hooks_that_come_between() -> None:
    _, _, optimizer, undo = stepped()
    hook = optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=0.5))
    optimizer.step()
    with pytest.raises(ConfigError, match="settings of the optimizer were changed during the step"):
        undo.undo()
    hook.remove()
    undo.close()
    optimizer.register_step_post_hook(lambda o, *_: o.zero_grad(set_to_none=False))
    undo = Undo(optimizer, exact=False)  # its hook comes after the one that clears
    optimizer.step()
    with pytest.raises(ConfigError, match="gradients were changed during the step"):
        undo.undo()


def test_nesterov_in_foreach_code_writes_to_the_gradients() -> None:
    p = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    undo = Undo(optimizer, exact=False)
    for _ in range(2):
        p.grad = torch.randn(5, dtype=torch.float64)
        before, given = cases.picture(optimizer), p.grad.clone()
        optimizer.step()
    assert not torch.equal(given, p.grad)  # else torch has stopped doing so, and moves_gradient() may go
    undo.undo()
    now = cases.picture(optimizer)
    torch.testing.assert_close(now[0], before[0], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(now[1]["state"], before[1]["state"], rtol=1e-14, atol=1e-14)


def test_a_hook_that_clips_after_lamb_noted_its_norms() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = cases.cls("Lamb")([p])
    undo = Undo(optimizer, exact=False)
    optimizer.register_step_pre_hook(lambda *_: [p.grad.mul_(0.1)].clear())
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ConfigError, match="gradients were changed during the step"):
        undo.undo()


@pytest.mark.parametrize("exact", [False, True])
def test_undone_twice_or_not_updated(exact: bool) -> None:
    p, other, optimizer, undo = stepped(exact)
    with pytest.raises(ConfigError, match="was not updated, or is undone already"):
        undo.undo([other])
    with pytest.raises(ConfigError, match="no parameter of its optimizers"):
        undo.undo([torch.ones(3)])
    undo.undo(p)
    with pytest.raises(ConfigError, match="was not updated, or is undone already"):
        undo.undo([p])
    with pytest.raises(ConfigError, match="nothing to undo"):
        undo.undo()
    optimizer.step()
    undo.forget()
    with pytest.raises(ConfigError, match="nothing to undo"):
        undo.undo()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ConfigError, match="nothing to undo"):
        undo.undo()


def test_nothing_is_changed_if_one_cannot_be_undone() -> None:
    p, other, optimizer, undo = stepped()
    other.grad = torch.ones(3)
    optimizer.step()
    other.grad.zero_()
    before = cases.picture(optimizer)
    with pytest.raises(ConfigError):
        undo.undo()
    assert cases.same(before, cases.picture(optimizer))
    undo.undo([p])
    assert undo.updated == [other]
