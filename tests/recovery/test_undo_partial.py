"""Updates that reached a part of the parameters: each prefix of them, and each operation of a step that was the last one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import undo_cases as cases  # noqa: E402
from tables import most  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from ftcomm.recovery import Undo  # noqa: E402

one_thread = cases.one_thread  # a fixture of every test here

SIZES = (1, 1, 1, 3)  # of the groups


class Died(Exception):
    """In the middle of a step."""


class Until(TorchDispatchMode):
    """Tensor operations up to one that is not done any more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.left = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise Died
        self.left -= 1
        return func(*args, **(kwargs or {}))


def stop_everywhere(optimizer: Any, undo: Any) -> set[int]:
    """Ends the step before each of its operations in turn, and undoes it. Returns the lengths of the updated prefixes."""
    before, seen = cases.picture(optimizer), set()
    optimizer.step()  # after which Undo has its buffers: each later one has the same operations
    undo.undo()
    for limit in range(10000):
        try:
            with Until(limit):
                optimizer.step()
        except Died:
            now = cases.picture(optimizer)
            changed = [not cases.same(*pair) for pair in zip(before[0], now[0], strict=True)]
            assert changed == sorted(changed, reverse=True)
            seen.add(sum(changed))
            if undo.updated:  # not if it died before or while Undo copied
                assert len(undo.updated) == len(changed)
                undo.undo()
            assert cases.same(before, cases.picture(optimizer))
        else:
            undo.undo()
            assert cases.same(before, cases.picture(optimizer))
            return seen | {len(before[0])}
    raise AssertionError("the step has no end")


@pytest.mark.parametrize("history", most([2], [0]))
@pytest.mark.parametrize(("name", "variant"), cases.variants(cases.ALL), ids=cases.case_id)
@pytest.mark.sample(8)
def test_a_step_that_ends_anywhere(name: str, variant: dict[str, Any], history: int) -> None:
    """foreach and fused code updates a group at once, single-tensor code one parameter after the other."""
    optimizer = cases.make(name, SIZES, seed=8, dtype=torch.float64, plain=True, **variant)
    undo = Undo(optimizer)
    cases.steps(optimizer, history, seed=9, plain=True, missing=0)
    cases.gradients(optimizer, seed=10, plain=True, missing=0)
    every = set(range(7)) if variant == {"foreach": False} else {0, 1, 2, 3, 6}
    assert stop_everywhere(optimizer, undo) == every


@pytest.mark.parametrize(("name", "variant", "exact"), cases.exact_and_plain(), ids=cases.case_id)
@pytest.mark.sample(16)
def test_an_optimizer_for_each_parameter(name: str, variant: dict[str, Any], exact: bool) -> None:
    """With state from complete updates before: those after a prefix have not stepped in this one."""
    for reached in range(6):
        optimizers = [cases.make(name, 1, seed=at, dtype=torch.float64, plain=True, **variant) for at in range(5)]
        undo = Undo(optimizers, exact=exact)
        for number in range(3):
            for at, optimizer in enumerate(optimizers):
                cases.gradients(optimizer, seed=10 * number + at, plain=True, missing=0)
                if number < 2:
                    optimizer.step()
            undo.forget()
        before = [cases.picture(optimizer) for optimizer in optimizers]
        for optimizer in optimizers[:reached]:
            optimizer.step()
        assert undo.updated == [p for optimizer in optimizers[:reached] for p in cases.parameters(optimizer)]
        changed = [not cases.same(was, cases.picture(one)) for was, one in zip(before, optimizers, strict=True)]
        assert changed == [at < reached for at in range(5)]
        if reached:
            undo.undo()
        for at, (was, optimizer) in enumerate(zip(before, optimizers, strict=True)):
            now = cases.picture(optimizer)
            if exact or at >= reached:
                assert cases.same(was, now)
            else:
                torch.testing.assert_close(now[0], was[0], rtol=1e-13, atol=1e-13)
                torch.testing.assert_close(now[1]["state"], was[1]["state"], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "variant"), cases.variants(cases.ALL), ids=cases.case_id)
def test_each_prefix_is_undone_of_a_whole_step(name: str, variant: dict[str, Any]) -> None:
    for size in range(7):
        optimizer = cases.make(name, SIZES, seed=5, plain=True, **variant)
        undo = Undo(optimizer)
        cases.steps(optimizer, 2, seed=6, plain=True, missing=0)
        cases.gradients(optimizer, seed=7, plain=True, missing=0)
        before = cases.picture(optimizer)
        optimizer.step()
        after = cases.picture(optimizer)
        order = cases.parameters(optimizer)
        undo.undo(params=order[:size])
        now = cases.picture(optimizer)
        assert cases.same(now[0], before[0][:size] + after[0][size:])
        for at in range(6):
            wanted = before if at < size else after
            assert cases.same(now[1]["state"].get(at), wanted[1]["state"].get(at))
        assert undo.updated == order[size:]
        if size < 6:
            undo.undo()
        assert cases.same(before, cases.picture(optimizer))


@pytest.mark.parametrize("name", cases.PLAIN)
def test_plain_undo_of_each_prefix_of_a_first_step(name: str) -> None:
    for size in range(8):
        optimizer = cases.make(name, 7, seed=22, dtype=torch.float64, plain=True)
        undo = Undo(optimizer, exact=False)
        cases.gradients(optimizer, seed=23, plain=True, missing=0)
        before = cases.picture(optimizer)
        optimizer.step()
        after = cases.picture(optimizer)
        order = cases.parameters(optimizer)
        undo.undo(params=order[:size])
        for at, p in enumerate(order):
            if at < size:
                torch.testing.assert_close(p.detach(), before[0][at], rtol=1e-13, atol=1e-13)
                assert (at in optimizer.state_dict()["state"]) == (at in before[1]["state"])
            else:
                assert cases.same(p.detach(), after[0][at])
        undo.undo() if size < 7 else None
        assert before[1]["state"].keys() == optimizer.state_dict()["state"].keys()
        assert cases.same(before[1]["param_groups"], optimizer.state_dict()["param_groups"])


def test_fused_sgd_that_torch_ends_itself() -> None:
    """Its kernel takes the momentum buffers of all parameters of a group or of none; the groups before are updated then."""
    params = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, momentum=0.9, fused=True)
    undo = Undo(optimizer)
    for p in params[:2]:
        p.grad = torch.randn(3)
    optimizer.step()
    undo.forget()
    before = cases.picture(optimizer)
    params[2].grad = torch.randn(3)
    # None raised means that torch can do it now: then missing=0 may go from the tests of fused SGD.
    with pytest.raises(TypeError, match="got NoneType"):
        optimizer.step()
    assert not cases.same(before[0], cases.picture(optimizer)[0])
    undo.undo()
    assert cases.same(before, cases.picture(optimizer))


def test_an_exception_in_the_backward_pass() -> None:
    """One optimizer per parameter, stepping as gradients arrive: the later layers are updated, the first ones not."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in model.parameters()}
    undo = Undo(optimizers.values())
    limit = [100]

    def step(p: Any) -> None:
        if limit[0] == 0:
            raise ConnectionError("a peer died")
        limit[0] -= 1
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    data = torch.randn(5, 4)
    model(data).sum().backward()
    undo.forget()
    assert undo.updated == []
    before = [cases.picture(optimizer) for optimizer in optimizers.values()]
    limit[0] = 3
    with pytest.raises(ConnectionError):
        model(data).pow(2).sum().backward()
    assert len(undo.updated) == 3
    assert not cases.same(before, [cases.picture(optimizer) for optimizer in optimizers.values()])
    undo.undo()
    assert cases.same(before, [cases.picture(optimizer) for optimizer in optimizers.values()])
