"""Strategy parallel-replay: which stages are shared, when the script changes them, and what a replacement does alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
import torch_store as torch_store_process

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from parallel_case import (  # noqa: E402
    AT,
    STAGES,
    WIDTH,
    Layers,
    events,
    log_of,
    plain_values,
    training,
)
from test_engine_pipeline import same  # noqa: E402
from torch import nn  # noqa: E402
from torch_keeper import Keep, kept  # noqa: E402


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


@pytest.fixture
def keep(ranks: harness.Ranks, torch_store: tuple[str, int]) -> Iterator[Keep]:
    yield from kept(ranks, torch_store, STAGES)


@pytest.fixture
def wanted(keep: Keep) -> Callable[..., list[Any]]:
    return functools.partial(plain_values, keep)


TABLE = pytest.mark.table


class Dropped(Layers):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(inputs), 0.1)


class Counted(Layers):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)


class Rebound(Layers):
    """Its buffer is another tensor after each forward pass."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.125
        return super().forward(inputs - self.mean)


class OwnGenerator(Layers):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.generator = torch.Generator().manual_seed(rank)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + torch.rand(WIDTH, generator=self.generator)


class Written(Layers):
    """Its parameters are changed behind the back of torch's counters."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.frozen.data.mul_(1.25)
        return super().forward(inputs)


class Unpicklable(Layers):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.name = lambda: "a closure"


class Remote(Layers):
    """Takes a factor that its pickle does not have."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.factor = 2.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.factor

    def __getstate__(self) -> Any:
        return {**vars(self), "factor": 1.0}


OUTSIDE = nn.Parameter(torch.ones(WIDTH))


class Outside(Layers):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * OUTSIDE


class Talking(Layers):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            dist.send(torch.zeros(1), 3)
        return super().forward(inputs)


def rescaled(step: int, layers: Any) -> None:
    """The script changes the module between steps: a buffer, a parameter, and what it does."""
    layers.calls.fill_(step)
    layers.factor = 1.0 + step / 8
    with torch.no_grad():
        layers.frozen.add_(0.25)


class Rescaled(Counted):
    factor = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Layers.forward(self, inputs) * self.factor + self.calls / 16


def test_what_the_script_changes_between_steps(keep: Keep) -> None:
    undisturbed = keep(training(None, make=Rescaled, change=rescaled)).values()
    job = keep(training(None, (1,), make=Rescaled, change=rescaled))
    same(job.values(), undisturbed)
    assert events(job, "parallel-replay")[0]["steps"] == AT - 1


class Changing(Layers):
    """Does what the script tells it to."""

    rate = 0.0
    asks = counts = False

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.asks and dist.get_rank() == 1:
            dist.send(torch.zeros(1), 3)
        if self.counts:
            self.calls = self.calls + 1
        outputs = super().forward(inputs)
        return nn.functional.dropout(outputs, self.rate) if self.rate else outputs


CHANGED = 5  # before that step


def drops(layers: Any) -> None:
    layers.rate = 0.1


def asks(layers: Any) -> None:
    layers.asks = True


def counts(layers: Any) -> None:
    layers.counts = True


def hooks(layers: Any) -> None:
    layers.norm.register_forward_hook(lambda module, inputs, output: output * 2)


def hides(layers: Any) -> None:
    layers.name = lambda: "a closure"


def freezes(layers: Any) -> None:
    layers.norm.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("does", "victim", "why"),
    [
        (drops, 1, "uses the random generators"),
        (hides, 1, "cannot be pickled"),
        (freezes, 1, ""),
        pytest.param(counts, 1, "changes buffers", marks=TABLE),
        pytest.param(asks, 1, "a trial of it fails", marks=TABLE),
        pytest.param(hooks, 2, "has hooks", marks=TABLE),
    ],
)
@pytest.mark.sample(1)
def test_what_the_script_changes_at_last(keep: Keep, does: Any, victim: int, why: str) -> None:
    """The first step has shown nothing of it."""

    def change(step: int, layers: Any) -> None:
        if step == CHANGED:
            does(layers)

    undisturbed = keep(training(None, make=Changing, change=change)).values()
    job = keep(training(None, (victim,), make=Changing, change=change))
    same(job.values(), undisturbed)
    assert job.deaths == [(victim, 0)]
    (event,) = events(job, "parallel-replay")
    assert event["left_out"] == {}
    assert event["steps"] == (CHANGED - 1 if why else AT - 1)
    lines = [line for line in log_of(job, victim).splitlines() if "alone" in line]
    assert len(lines) == (1 if why else 0)
    assert not why or why in lines[0]


def anomalies(step: int, layers: Any) -> None:
    """Not in the first step: torch asks for shapes there, with NaN."""
    torch.autograd.set_detect_anomaly(step > 0)


def test_detection_of_anomalies(keep: Keep, wanted: Any) -> None:
    """What a ghost passes on is not content, but must not look like an error either."""
    job = keep(training(None, (1,), change=anomalies))
    same(job.values(), wanted())
    assert job.deaths == [(1, 0)]
    assert events(job, "parallel-replay")[0]["steps"] == AT - 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Dropped, "uses the random generators"),
        (Counted, "changes buffers or generators of the module"),
        pytest.param(Rebound, "changes buffers or", marks=TABLE),
        pytest.param(OwnGenerator, "changes buffers or generators", marks=TABLE),
        (Written, "changes parameters"),
        (Unpicklable, "cannot be pickled"),
        pytest.param(Remote, "a copy of the module", marks=TABLE),
        pytest.param(Outside, "not parameters of the module", marks=TABLE),
        pytest.param(Talking, "communicates", marks=TABLE),
    ],
)
@pytest.mark.sample(2)
def test_stages_that_are_not_shared(keep: Keep, make: Any, why: str) -> None:
    undisturbed = keep(training(None, make=make)).values()
    job = keep(training(None, (1,), make=make))
    same(job.values(), undisturbed)
    assert events(job, "parallel-replay") == []
    lines = [line for line in log_of(job, 1).splitlines() if "alone" in line]
    assert len(lines) == 1
    assert why in lines[0]


@pytest.mark.table
def test_log_groups_do_it_alone(keep: Keep, wanted: Any) -> None:
    job = keep(training(None, (1,)), hosts=["a", "a", "b", "b"], log=[[0, 1], [2, 3]])
    same(job.values(), wanted())
    assert events(job, "parallel-replay") == []
    assert "messages inside its log group are in no log" in log_of(job, 1)
