"""What a dropped step has changed is put back, in one process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from ftcomm.recovery.engine.restorable import Restorable


class Keeping(nn.Module):
    """Changes its buffers in each way there is, and what it has besides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("late", None)
        self.register_buffer("gone", torch.ones(1))
        self.register_buffer("written", torch.zeros(2))
        self.seen, self.steps = 0, [torch.zeros(1)]

    def forward(self, x: Any) -> Any:
        self.assigned = 0.9 * self.assigned + x.mean(0)
        self.late = x.mean(0) if self.late is None else self.late + 1
        if not hasattr(self, "lazy"):
            self.register_buffer("lazy", torch.zeros(3))
        self.lazy += 1
        self.gone = None
        self.written += 1
        self.seen += 1
        self.steps[0] += 1
        return self.inner(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.steps = state["seen"], state["steps"]


def content(module: Any) -> Any:
    buffers = [(name, None if b is None else b.tolist()) for name, b in module._buffers.items()]
    inner = [(name, b.tolist()) for name, b in module.inner._buffers.items()]
    return buffers, inner, module.seen, [step.tolist() for step in module.steps]


@pytest.mark.parametrize("before", [0, 1, 3])
def test_buffers_and_extra_state_are_put_back(before: int) -> None:
    """Also by the second step that is dropped, and with a step between that is not."""
    module, x = Keeping(), torch.randn(4, 2)
    restorable = Restorable(module, [], [], None)
    for _ in range(before):
        restorable.save()
        module(x)
    for _ in range(2):
        for times in (1, 2):  # micro-batches
            restorable.save()
            was = content(module)
            for _ in range(times):
                module(x)
            assert content(module) != was
            restorable.restore()
            assert content(module) == was
        module(x)


def test_a_buffer_of_another_shape_is_put_back() -> None:
    module = nn.Module()
    module.register_buffer("history", torch.zeros(4))
    restorable = Restorable(module, [], [], None)
    for size in (4, 3, 2):
        assert len(module.history) == size
        restorable.save()
        module.history = module.history[:-1]  # of the same memory
        module.history += 1
        restorable.restore()
        assert module.history.tolist() == [0.0] * size
        module.history = module.history[:-1]
