"""What Undo refuses, each with its reason and what to do instead."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import undo_cases as cases  # noqa: E402

from ftcomm.errors import ConfigError, Unsupported  # noqa: E402
from ftcomm.recovery import Undo  # noqa: E402


def parameter() -> Any:
    return torch.nn.Parameter(torch.ones(3))


def capturable(optimizer: Any) -> Any:
    optimizer.param_groups[0]["capturable"] = True  # said to Adam itself it would need a GPU
    return optimizer


class Mine(torch.optim.Adam):
    pass


class Other(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.optim.LBFGS([p]), "LBFGS cannot be undone.*Save a copy"),
        (lambda p: torch.optim.SparseAdam([p]), "SparseAdam cannot be undone.*Use Adam"),
        (lambda p: Mine([p]), "Mine is a subclass of Adam.*Use Adam itself"),
        (lambda p: Other([p]), r"Other is not known to Undo\. Known are SGD, Adam.*Save a copy"),
        (lambda p: torch.optim.Adadelta([p]), "Adadelta is not known"),
        (
            lambda p: torch.optim.Adam([p], differentiable=True),
            r"differentiable=True \(group 0\).*autograd.*Switch it off",
        ),
        (lambda p: torch.nn.Linear(1, 1), "takes a torch.optim.Optimizer or several, not .*Linear"),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_either_way(make: Any, text: str, exact: bool) -> None:
    with pytest.raises(Unsupported, match=text):
        Undo(make(parameter()), exact=exact)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.optim.Adam([p], amsgrad=True), r"max\(\) forgets"),
        (lambda p: torch.optim.Adamax([p]), r"max\(\) forgets"),
        (lambda p: capturable(torch.optim.Adam([p])), "corrections of the first steps are rounded on the device"),
        (lambda p: torch.optim.Adam([p], betas=(0.0, 0.9)), "beta1=0 is 0"),
        (lambda p: torch.optim.NAdam([p], betas=(0.9, 0.0)), "beta2=0 is 0"),
        (lambda p: torch.optim.RMSprop([p], alpha=0.0), "alpha=0 is 0"),
        (lambda p: torch.optim.SGD([p], momentum=0.001), "momentum=0.001 is 0.001"),
        (lambda p: torch.optim.SGD([p], lr=2.0, weight_decay=0.5), r"1 - lr \* weight_decay is 0"),
        (lambda p: torch.optim.AdamW([p], lr=10.0, weight_decay=0.1), r"1 - lr \* weight_decay is 0"),
    ],
)
def test_plain_undo_only(make: Any, text: str) -> None:
    optimizer = make(parameter())
    with pytest.raises(Unsupported, match=f"has no plain undo: .*{text}.*Use exact=True"):
        Undo(optimizer, exact=False)
    assert not optimizer._optimizer_step_pre_hooks
    Undo(optimizer).close()


def test_complex_parameters_are_copied_only() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.Adam([p])
    with pytest.raises(Unsupported, match="plain undo takes real numbers. Use exact=True"):
        Undo(optimizer, exact=False)
    undo = Undo(optimizer)
    p.grad = torch.full((3,), 1 + 2j)
    before = cases.picture(optimizer)
    optimizer.step()
    undo.undo()
    assert cases.same(before, cases.picture(optimizer))


@pytest.mark.parametrize("exact", [False, True])
def test_sparse_gradients_stop_the_step(exact: bool) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    undo = Undo(optimizer, exact=exact)
    table(torch.tensor([1])).sum().backward()
    before = cases.picture(optimizer)
    with pytest.raises(Unsupported, match="gradient of SGD is sparse.*Use dense"):
        optimizer.step()
    assert cases.same(before, cases.picture(optimizer))
    undo.close()


def test_settings_that_change_later_stop_the_step() -> None:
    p = parameter()
    optimizer = torch.optim.Adam([p])
    undo = Undo(optimizer, exact=False)
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(Unsupported, match="has no plain undo"):
        optimizer.step()
    assert undo.updated == [p]  # of the step before


def test_closures_and_lamb() -> None:
    p = parameter()
    optimizer = cases.cls("Lamb")([p])
    undo = Undo(optimizer, exact=False)
    with pytest.raises(Unsupported, match=r"step\(closure\) has no plain undo.*or use exact=True"):
        optimizer.step(lambda: None)
    undo.close()


def test_parameters_of_unknown_types() -> None:
    class Odd(torch.Tensor):
        pass

    p = torch.ones(3).as_subclass(Odd).requires_grad_()
    with pytest.raises(Unsupported, match="is a Odd"):
        Undo(torch.optim.SGD([p], lr=0.1))


def test_state_that_is_no_tensor() -> None:
    p = parameter()
    optimizer = torch.optim.Adam([p])
    undo = Undo(optimizer)
    p.grad = torch.ones(3)
    optimizer.step()
    for value, what in (([torch.ones(1)], "is a list"), (torch.ones(2).to_sparse(), r"is a tensor of layout .*sparse")):
        optimizer.state[p]["more"] = value
        with pytest.raises(Unsupported, match=f"The state 'more' of Adam {what}"):
            optimizer.step()
    undo.close()


def test_none_and_one_parameter_twice() -> None:
    with pytest.raises(ConfigError, match="got no optimizer"):
        Undo([])
    p = parameter()
    with pytest.raises(ConfigError, match="in two of the optimizers"):
        Undo([torch.optim.SGD([p]), torch.optim.Adam([p])])


def test_no_torch_before_it_is_used() -> None:
    code = "import sys, ftcomm.recovery as r; assert 'Undo' in dir(r); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_timm_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)  # an import of it is an error
    Undo(torch.optim.SGD([parameter()])).close()
    with pytest.raises(Unsupported, match="Other is not known to Undo"):
        Undo(Other([parameter()]))
