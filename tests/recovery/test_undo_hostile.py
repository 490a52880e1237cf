"""What others do to an optimizer and its parameters while Undo is there: right bits, or an error that says why not."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import undo_cases as cases  # noqa: E402

from ftcomm.errors import ConfigError, Unsupported  # noqa: E402
from ftcomm.recovery import Undo  # noqa: E402

one_thread = cases.one_thread  # a fixture of every test here


def parameter(*shape: int, **more: Any) -> Any:
    return torch.nn.Parameter(torch.randn(shape or (3,), **more))


def adam(exact: bool = True, count: int = 1, kind: Any = torch.optim.Adam, **more: Any) -> Any:
    """Parameters with gradients, their optimizer, and its Undo."""
    params = [parameter() for _ in range(count)]
    optimizer = kind(params, **more)
    for p in params:
        p.grad = torch.ones(3)
    return *params, optimizer, Undo(optimizer, exact=exact)


def is_taken_back(optimizer: Any, undo: Any, before: Any) -> bool:
    undo.undo()
    return cases.same(before, cases.picture(optimizer))


@pytest.mark.parametrize("fused", [False, True])
def test_a_hook_that_clears_gradients_before_undo_looks(fused: bool) -> None:
    p = parameter()
    optimizer = torch.optim.Adam([p], fused=fused)
    optimizer.register_step_post_hook(lambda o, *_: o.zero_grad())
    undo = Undo(optimizer)
    for closure in (None, lambda: setattr(p, "grad", torch.ones(3))):
        p.grad = None if closure else torch.ones(3)
        before = cases.picture(optimizer)
        optimizer.step(closure)
        assert undo.updated == [p]
        assert is_taken_back(optimizer, undo, before)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_hook_that_gives_gradients_after_the_copies(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p, other, third, optimizer, undo = adam(count=3, foreach=True)
    other.grad = third.grad = None
    optimizer.register_step_pre_hook(lambda *_: setattr(other, "grad", torch.ones(3)))
    before = cases.picture(optimizer)
    if interrupted:
        monkeypatch.setattr(torch, "_foreach_sqrt", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    else:
        optimizer.step()
        assert undo.updated == [p, other]
        with pytest.raises(ConfigError, match="was not updated"):
            undo.undo([third])
    assert is_taken_back(optimizer, undo, before)


def test_plain_undo_sees_such_a_hook() -> None:
    _, other, optimizer, undo = adam(exact=False, count=2)
    other.grad = None
    optimizer.register_step_pre_hook(lambda *_: setattr(other, "grad", torch.ones(3)))
    optimizer.step()
    with pytest.raises(ConfigError, match=r"gave a parameter its gradient during the step.*exact=True"):
        undo.undo()


@pytest.mark.parametrize("name", cases.FUSED)
def test_plain_undo_sees_a_hook_that_changes_gradients_of_fused_code(name: str) -> None:
    p = parameter()
    optimizer = cases.cls(name)([p], fused=True)
    optimizer.register_step_post_hook(lambda *_: [p.grad.mul_(2)].clear())
    undo = Undo(optimizer, exact=False)
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ConfigError, match="gradients were changed during the step"):
        undo.undo()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p, o: setattr(p, "data", p.data.half()),
        lambda p, o: setattr(p, "data", torch.zeros(2, 3)),
        lambda p, o: setattr(o.state[p]["exp_avg"], "data", torch.zeros(3).half()),
    ],
)
def test_another_type_or_shape(spoil: Any) -> None:
    p, other, optimizer, undo = adam(count=2)
    optimizer.step()
    optimizer.step()
    spoil(p, optimizer)
    after = cases.picture(optimizer)
    with pytest.raises(ConfigError, match=r"was of torch.float32 and shape .* now\. Undo before"):
        undo.undo()
    assert cases.same(after, cases.picture(optimizer))
    undo.undo(other)


def test_plain_undo_sees_what_was_replaced() -> None:
    def state(p: Any, optimizer: Any) -> None:
        new = torch.zeros(3)
        while new._version < optimizer.state[p]["exp_avg"]._version:
            new.add_(0)
        optimizer.state[p]["exp_avg"] = new

    for spoil in (state, lambda p, o: setattr(p, "data", torch.zeros(3)), lambda _, o: o.state.clear()):
        p, optimizer, undo = adam(exact=False)
        optimizer.step()
        spoil(p, optimizer)
        with pytest.raises(ConfigError, match="something else changed"):
            undo.undo()


def test_exact_undo_puts_back_what_was_replaced() -> None:
    p, optimizer, undo = adam()
    optimizer.step()
    before = cases.picture(optimizer)
    optimizer.step()
    optimizer.state.clear()
    p.data = torch.full((3,), 9.0)
    assert is_taken_back(optimizer, undo, before)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_memory_that_is_updated_twice() -> None:
    p, base = parameter(), torch.randn(6)
    views = [torch.nn.Parameter(base[:4]), torch.nn.Parameter(base[2:])]
    for params in ([p, p], views):
        optimizer = torch.optim.AdamW(params, lr=0.5, weight_decay=0.5)
        with pytest.raises(Unsupported, match=r"share memory.*exact=True"):
            Undo(optimizer, exact=False)
        undo = Undo(optimizer)
        for q in params:
            q.grad = torch.ones_like(q)
        before = cases.picture(optimizer)
        optimizer.step()
        assert is_taken_back(optimizer, undo, before)
    Undo(torch.optim.SGD([base[:3].requires_grad_(), base[3:].requires_grad_()]), exact=False)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_optimizers_whose_parameters_share_memory(order: tuple[int, int]) -> None:
    base = torch.randn(6)
    before = base.clone()
    params = [torch.nn.Parameter(base[:4]), torch.nn.Parameter(base[2:])]
    optimizers = [torch.optim.SGD([p], lr=0.5) for p in params]
    undo = Undo(optimizers)
    for at in order:
        params[at].grad = torch.ones(4)
        optimizers[at].step()
    undo.undo()
    assert cases.same(before, base)


def test_parameters_that_are_added_later() -> None:
    _, optimizer, undo = adam(exact=False)
    optimizer.add_param_group({"params": [parameter(dtype=torch.complex64)]})
    with pytest.raises(Unsupported, match="plain undo takes real numbers"):
        optimizer.step()
    _, optimizer, undo = adam()
    p = parameter()
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.add_param_group({"params": [p]})
    before = cases.picture(optimizer)
    optimizer.step()
    assert is_taken_back(optimizer, undo, before)
    two = Undo([optimizer, another := torch.optim.SGD([parameter()])])
    another.add_param_group({"params": [p]})
    optimizer.step()
    with pytest.raises(ConfigError, match="in two of the optimizers"):
        two.undo()


def test_steps_of_two_iterations_are_not_undone_together() -> None:
    params = [parameter() for _ in range(4)]
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in params]
    undo = Undo(optimizers)
    for p in params:
        p.grad = torch.ones(3)
    for optimizer in (*optimizers, *optimizers[:2]):
        optimizer.step()
    with pytest.raises(ConfigError, match=r"made 2 steps since the last forget\(\) and some 1.*undo\(params"):
        undo.undo()
    undo.undo(params[:2])
    undo.forget()
    optimizers[3].step()
    undo.undo()


@pytest.mark.parametrize("exact", [False, True])
def test_lamb_counts_steps_without_gradients(exact: bool) -> None:
    optimizer = cases.cls("Lamb")([parameter()])
    undo = Undo(optimizer, exact=exact)
    before = cases.picture(optimizer)
    optimizer.step()
    assert is_taken_back(optimizer, undo, before)
    with pytest.raises(ConfigError, match="nothing to undo"):
        undo.undo()


def test_steps_in_inference_mode() -> None:
    _, optimizer, undo = adam(kind=torch.optim.SGD)
    before = cases.picture(optimizer)
    with torch.inference_mode():
        optimizer.step()
    assert is_taken_back(optimizer, undo, before)
    optimizer.step()  # into buffers that were made in that mode
    _, optimizer, undo = adam()  # whose state is made in that mode
    with torch.inference_mode():
        optimizer.step()
        before = cases.picture(optimizer)
        optimizer.step()
    assert is_taken_back(optimizer, undo, before)
    _, optimizer, undo = adam(exact=False)
    with torch.inference_mode():
        optimizer.step()
    with pytest.raises(ConfigError, match=r"inference mode.*exact=True"):
        undo.undo()


def test_sparse_gradients_of_a_closure() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    for exact in (True, False):
        undo = Undo(optimizer, exact=exact)
        optimizer.state.clear()
        optimizer.zero_grad()
        before = cases.picture(optimizer)
        optimizer.step(lambda: table(torch.tensor([1])).sum().backward())
        if exact:
            assert is_taken_back(optimizer, undo, before)
            continue
        with pytest.raises(ConfigError, match=r"sparse gradients.*exact=True"):
            undo.undo()


def test_threads_copies_and_what_nobody_holds() -> None:
    _, optimizer, undo = adam()
    before = cases.picture(optimizer)
    optimizer.step()
    for make in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(Unsupported, match="cannot be copied or pickled"):
            make(undo)
    assert not copy.deepcopy(optimizer)._optimizer_step_pre_hooks
    thread = threading.Thread(target=undo.undo)
    thread.start()
    thread.join()
    assert cases.same(before, cases.picture(optimizer))
    assert sys.getrefcount(undo) == 2
    del undo
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
