"""Exact undo: the same bits, whatever the values, the settings and the moment."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import undo_cases as cases  # noqa: E402

from ftcomm.recovery import Undo  # noqa: E402

one_thread = cases.one_thread  # a fixture of every test here


@pytest.mark.parametrize("history", [0, 3])
@pytest.mark.parametrize(("name", "variant"), cases.variants(cases.ALL), ids=cases.case_id)
@pytest.mark.parametrize("number", cases.NUMBERS)
def test_each_bit_is_as_before(place: Any, name: str, variant: dict[str, Any], history: int, number: int) -> None:
    def run(device: str) -> None:
        for seed, optimizer in cases.batches(name, history + 1, number, device=device, **variant):
            undo = Undo(optimizer)
            # torch's fused SGD takes all momentum buffers of a group or none: its first step makes all of them.
            if history and (name, variant) == ("SGD", {"fused": True}):
                cases.steps(optimizer, 1, seed=seed + 1, missing=0)
            cases.steps(optimizer, history, seed=seed)
            cases.gradients(optimizer, seed=seed + 77)
            before = cases.picture(optimizer)
            optimizer.step()
            assert not cases.same(before, cases.picture(optimizer))
            assert undo.updated == [p for p in cases.parameters(optimizer) if p.grad is not None]
            undo.undo()
            assert cases.same(before, cases.picture(optimizer))
            assert undo.updated == []

    cases.check(name, variant, place.device)
    place(run)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adamax"])
@pytest.mark.parametrize("foreach", [False, True])
def test_capturable_steps_on_another_stream(on_gpu: Any, name: str, foreach: bool) -> None:
    """Their numbers of steps are on the device. What one stream updates and undoes, the next one finds undone."""

    def run(device: str) -> None:
        for seed, optimizer in cases.batches(name, 7, 5, device=device, foreach=foreach, capturable=True):
            undo = Undo(optimizer)
            cases.steps(optimizer, 2, seed=seed)
            cases.gradients(optimizer, seed=seed + 77)
            before = cases.picture(optimizer)
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                torch.cuda._sleep(20_000_000)
                optimizer.step()
                undo.undo()
            torch.cuda.current_stream().wait_stream(other)
            assert cases.same(before, cases.picture(optimizer))

    on_gpu(run)


def test_a_step_that_is_captured_is_refused(on_gpu: Any) -> None:
    def run(device: str) -> None:
        p = torch.nn.Parameter(torch.ones(4, device=device))
        optimizer = torch.optim.Adam([p], capturable=True)
        undo = Undo(optimizer)
        p.grad = torch.ones(4, device=device)
        optimizer.step()
        before = p.detach().clone()
        with pytest.raises(Exception, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
        torch.cuda.synchronize()
        assert torch.equal(p, before)
        undo.forget()

    on_gpu(run)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", cases.ALL)
@pytest.mark.sample(12)
def test_each_type_of_number(place: Any, name: str, dtype: Any) -> None:
    def run(device: str) -> None:
        optimizer = cases.make(name, 100, seed=3, dtype=dtype, device=device)
        undo = Undo(optimizer)
        for number in range(3):
            cases.gradients(optimizer, seed=number)
            before = cases.picture(optimizer)
            optimizer.step()
            undo.undo()
            assert cases.same(before, cases.picture(optimizer))
            optimizer.step()

    cases.check(name, {}, place.device)
    place(run)


@pytest.mark.parametrize("name", cases.ALL)
def test_going_on_is_as_if_the_step_had_never_been(name: str) -> None:
    runs = []
    for with_undo in (False, True):
        optimizer = cases.make(name, 60, seed=4, plain=True)
        undo = Undo(optimizer) if with_undo else None
        for number in range(6):
            if undo is not None and number in (0, 3):
                cases.gradients(optimizer, seed=1000 + number, plain=True)
                optimizer.step()
                undo.undo()
            cases.gradients(optimizer, seed=number, plain=True)
            optimizer.step()
        runs.append(cases.picture(optimizer))
    assert cases.same(*runs)


def test_state_that_is_made_by_the_step_is_gone() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p])
    undo = Undo(optimizer)
    p.grad = torch.ones(2)
    optimizer.step()
    undo.undo()
    assert p not in optimizer.state
    assert optimizer.state_dict()["state"] == {}


def test_state_that_the_step_adds_to_is_as_short_as_before() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([p])
    undo = Undo(optimizer)
    assert optimizer.state[p] == {}  # looking makes it
    p.grad = torch.ones(2)
    optimizer.step()
    undo.undo()
    assert p in optimizer.state
    assert optimizer.state[p] == {}


@pytest.mark.parametrize("none", [False, True])
def test_a_closure_that_computes_the_gradients(none: bool) -> None:
    p, other = (torch.nn.Parameter(torch.randn(4)) for _ in range(2))
    optimizer = torch.optim.Adam([p, other])
    undo = Undo(optimizer)
    before = cases.picture(optimizer)

    def closure() -> Any:
        optimizer.zero_grad(set_to_none=none)
        loss = p.pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert undo.updated == [p]
    undo.undo()
    assert cases.same(before, cases.picture(optimizer))


def test_memory_is_of_one_copy_and_used_again() -> None:
    p = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([p])
    undo = Undo(optimizer)
    assert undo.memory() == 0
    for number in range(4):
        p.grad = torch.ones(1000)
        optimizer.step()
        assert undo.memory() == (4000 if number == 0 else 12004)
    undo.forget()
    assert undo.memory() == 12004
    undo.close()
    assert undo.memory() == 0


def test_close_takes_the_hooks_off() -> None:
    from ftcomm.errors import Closed

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p])
    undo = Undo(optimizer)
    undo.close()
    undo.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    with pytest.raises(Closed, match="Make a new one"):
        undo.undo()


def test_copies_are_planned_again_when_something_is_another_tensor() -> None:
    """Each of these between two steps: the copies are of what is there, not of what was there."""
    p, other = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
    optimizer = torch.optim.SGD([p, other], lr=0.1, momentum=0.9)
    undo = Undo(optimizer)
    changes = (
        lambda: None,
        lambda: setattr(other, "grad", None),
        lambda: setattr(p, "data", torch.randn(3)),
        lambda: optimizer.state[p].update(momentum_buffer=torch.randn(3)),
        lambda: setattr(optimizer.state[p]["momentum_buffer"], "data", torch.randn(3)),
        lambda: optimizer.state[p].update(more=1.5),
        lambda: optimizer.state[p].update(more=2.5),
        lambda: optimizer.state.pop(p),
        lambda: optimizer.state[p].clear(),  # noqa: PLW0108 - another one each time
        undo.undo,
        lambda: [optimizer.state.clear(), *(setattr(q, "data", q.data.double()) for q in (p, other))],
    )
    for change in changes:
        for _ in range(2):
            p.grad, other.grad = torch.ones_like(p), torch.ones_like(other)
            optimizer.step()
        change()
        for q in (p, other):
            q.grad = None if q.grad is None else torch.ones_like(q)
        before = cases.picture(optimizer)
        optimizer.step()
        undo.undo()
        assert cases.same(before, cases.picture(optimizer))


def test_one_step_back_only() -> None:
    optimizer = cases.make("RMSprop", 20, seed=13, plain=True)
    undo = Undo(optimizer)
    pictures = []
    for number in range(3):
        cases.gradients(optimizer, seed=random.Random(number).randrange(99), plain=True, missing=0.5)
        pictures.append(cases.picture(optimizer))
        optimizer.step()
    undo.undo()
    assert cases.same(pictures[-1], cases.picture(optimizer))
