"""What is shared out: forward and backward pass of one micro-batch, anywhere, and the sum of gradients in training's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ftcomm.torch.blocks import checksum

__all__ = ["Content", "Done", "Item", "add", "compute", "content_of", "fresh", "parts", "settings", "tensors_of"]


class Content(NamedTuple):
    """Of a message: its bytes' number and CRC-32C."""

    size: int
    crc: int


@dataclass
class Item:
    """One micro-batch of a stage: its inputs, and either the gradients of its outputs or what its loss needs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: tuple[Tensor | None, ...] = ()
    has_loss: bool = False
    target: Any = None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Done:
    """Its gradients, by parameter; loss and outputs if it has a loss.

    Attributes:
        forward, backward: what a stage sends of it to the next one, if it has no loss, and to the one before.
    """

    gradients: list[Tensor | None]
    loss: Tensor | None = None
    outputs: tuple[Any, ...] = ()
    forward: list[Content] = field(default_factory=list)
    backward: list[Content] = field(default_factory=list)


def compute(module: nn.Module, loss_of: Callable[..., Tensor] | None, item: Item) -> Done:
    """By the same operations as a schedule's. ``.grad`` of the parameters is as before, afterwards."""
    parameters = list(module.parameters())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.enable_grad():
            args, kwargs = fresh((item.args, item.kwargs))
            output = module(*args, **kwargs)
            outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
            if item.has_loss:
                assert loss_of is not None
                loss = loss_of(output, item.target, **item.loss_kwargs)
                torch.autograd.backward([loss])
                done = Done([], loss.detach(), tree_map(_plain, outputs))
            else:
                pairs = [(o, g) for o, g in zip(outputs, item.gradients, strict=True) if o.requires_grad]
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
                done = Done([], forward=[content_of(o) for o in outputs])
        inputs = [t for t in tensors_of(args) if t.requires_grad]
        done.backward = [content_of(t.grad) for t in inputs if t.grad is not None]
        done.gradients = [parameter.grad for parameter in parameters]
        return done
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def add(module: nn.Module, done: Done) -> None:
    """Onto ``.grad``, one after another, as backward passes do: ((g0 + g1) + g2) + ... A sum of sums has other bits."""
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), done.gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            else:
                parameter.grad.add_(gradient)


def parts(count: int, hands: int) -> list[range]:
    """``count`` dealt out in turn, so that results are there in the order in which they are added; some may be empty."""
    return [range(hand, count, hands) for hand in range(hands)]


def content_of(tensor: Tensor) -> Content:
    """As a message."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return Content(data.numel(), checksum(data))


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def settings() -> dict[str, Any]:
    """What the bits of a computation depend on besides its inputs, in the calling thread."""
    tiny = torch.full((1,), 1e-310, dtype=torch.float64)
    return {
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "denormals": bool((tiny * 1.0 != 0).item()),
    }


def differing(mine: dict[str, Any], other: dict[str, Any]) -> Sequence[str]:
    return [f"{name} {mine.get(name)} and {other.get(name)}" for name in other if mine.get(name) != other[name]]


def fresh(value: Any) -> Any:
    """With the same tensors as leaves of a new graph, without gradients."""
    return tree_map(_fresh, value)


def _fresh(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
