"""What a replacement needs to go on: model, optimizer and the user's extra state, as metadata and blocks of bytes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ftcomm.errors import ConfigError

__all__ = ["TrainingState", "blocks"]

DIRECT = 1 << 20  # tensors from this size on travel from and to their own memory
PACKED = 8 << 20  # smaller ones together, in blocks of this size


class _Slot:
    """Stands for tensor number ``index`` in a pickled structure."""

    def __init__(self, index: int) -> None:
        self.index = index


class TrainingState:
    """Collects (on a survivor) or receives (on a replacement) the state of a replicated training run.

    Args:
        model: a Module or DistributedDataParallel whose parameters are whole on every rank.
        optimizer: an Optimizer, a sequence of them, or None.
        extra: what else is equal on all ranks; values with ``state_dict`` and ``load_state_dict`` (schedulers, scalers) are
            restored in place, others are returned by the join point.
    """

    def __init__(self, model: Any, optimizer: Any, extra: dict[str, Any] | None) -> None:
        self.module = getattr(model, "module", model) if hasattr(model, "reducer") else model
        self.optimizers: list[Any] = (
            [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        )
        self.extra = extra or {}
        self.tensors: list[torch.Tensor] = []
        self._check()

    def _check(self) -> None:
        for name, parameter in self.module.named_parameters():
            if type(parameter.data).__name__ == "DTensor":
                raise ConfigError(
                    f"join_point moves the state of replicas, but parameter {name!r} is sharded (FSDP2 or DTensor): its dead "
                    "rank held the only copy of a part. Use checkpoints for sharded models."
                )
        sharding = sys.modules.get("torch.distributed.optim")  # importing it takes longer than many a recovery
        if sharding and any(isinstance(one, sharding.ZeroRedundancyOptimizer) for one in self.optimizers):
            raise ConfigError(
                "join_point can't restore a ZeroRedundancyOptimizer: each rank holds a part of its state that nobody else has. "
                "Use an ordinary optimizer, or checkpoints."
            )

    def model_tensors(self) -> list[tuple[str, torch.Tensor]]:
        named = [(f"parameter {name}", p.data) for name, p in self.module.named_parameters()]
        return named + [(f"buffer {name}", b.data) for name, b in self.module.named_buffers()]

    # -- on a survivor -------------------------------------------------------------------------------------------

    def pack(self, more: dict[str, Any]) -> bytes:
        """The metadata; ``tensors`` are then what the blocks carry."""
        model = self.model_tensors()
        self.tensors = [tensor for _, tensor in model]
        layout = [(name, tuple(t.shape), t.dtype) for name, t in model]
        rest = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "extra": {name: value.state_dict() if _stateful(value) else value for name, value in self.extra.items()},
            "more": more,
        }
        return pickle.dumps({"model": layout, "rest": self._outline(rest), "tensors": self._shapes(len(model))})

    def _outline(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            self.tensors.append(value.detach())
            return _Slot(len(self.tensors) - 1)
        if isinstance(value, dict):
            return {key: self._outline(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._outline(item) for item in value)
        return value

    def _shapes(self, first: int) -> list[tuple[tuple[int, ...], torch.dtype, str]]:
        return [(tuple(t.shape), t.dtype, t.device.type) for t in self.tensors[first:]]

    # -- on a replacement ----------------------------------------------------------------------------------------

    def expect(self, header: bytes) -> None:
        """Reads the metadata and makes room: the model's own memory, new tensors for the rest."""
        self._received = pickle.loads(header)
        model = self.model_tensors()
        own = [(name, tuple(t.shape), t.dtype) for name, t in model]
        for theirs, ours in zip(self._received["model"], own, strict=False):
            if theirs != ours:
                raise ConfigError(
                    f"The survivors' model has {theirs[0]} {list(theirs[1])} of {theirs[2]} where this replacement has "
                    f"{ours[0]} {list(ours[1])} of {ours[2]}: it must run the same script with the same settings."
                )
        if len(self._received["model"]) != len(own):
            raise ConfigError(
                f"The survivors' model has {len(self._received['model'])} parameters and buffers, this replacement's has "
                f"{len(own)}: it must run the same script with the same settings."
            )
        device = own and model[0][1].device
        rest = [
            torch.empty(shape, dtype=dtype, device="cpu" if kind == "cpu" else device)
            for shape, dtype, kind in self._received["tensors"]
        ]
        self.tensors = [tensor for _, tensor in model] + rest

    def load(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Puts what came into the optimizers and stateful extras; returns the other extras, and what pack() was given."""
        rest = self._inline(self._received["rest"])
        for optimizer, state in zip(self.optimizers, rest["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        extra = {}
        for name, value in rest["extra"].items():
            mine: Any = self.extra.get(name)
            if _stateful(mine):
                mine.load_state_dict(value)
            extra[name] = mine if _stateful(mine) else value
        return extra, rest["more"]

    def _inline(self, value: Any) -> Any:
        if isinstance(value, _Slot):
            return self.tensors[value.index]
        if isinstance(value, dict):
            return {key: self._inline(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._inline(item) for item in value)
        return value

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


def _stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def blocks(tensors: list[torch.Tensor], receiving: bool) -> Iterator[torch.Tensor]:
    """The tensors' bytes as CPU tensors to send or to receive into, the same sequence on both sides.

    A large CPU tensor is its own block; others are packed. On the receiving side, a packed block is put into its tensors when
    the next one is asked for.
    """
    group: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            continue
        if nbytes < DIRECT:
            if size + nbytes > PACKED:
                yield from _packed(group, size, receiving)
                group, size = [], 0
            group.append(tensor)
            size += nbytes
        elif tensor.device.type == "cpu" and tensor.is_contiguous():
            yield _bytes(tensor)
        else:
            yield from _packed([tensor], nbytes, receiving)
    if group:
        yield from _packed(group, size, receiving)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _packed(group: list[torch.Tensor], size: int, receiving: bool) -> Iterator[torch.Tensor]:
    if not group:
        return
    if not receiving:
        yield torch.cat([_bytes(tensor.cpu().contiguous()) for tensor in group])
        return
    block = torch.empty(size, dtype=torch.uint8)
    yield block
    at = 0
    with torch.no_grad():
        for tensor in group:
            nbytes = tensor.numel() * tensor.element_size()
            # A piece may lie at any byte: only a copy of it can be seen as another type.
            piece = block[at : at + nbytes].clone().view(tensor.dtype).reshape(tensor.shape)
            tensor.copy_(piece)
            at += nbytes
