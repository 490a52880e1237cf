"""What a replacement needs to go on: model, optimizer and the user's extra state, as a header and tensors."""

from __future__ import annotations

import copy
import hashlib
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ftcomm.errors import ConfigError
from ftcomm.torch.modules import extra_states, set_extra_states, unwrapped
from ftcomm.torch.optimizers import load_optimizer
from ftcomm.torch.shards import Part, Shards, is_sharded, local

__all__ = ["TrainingState"]

_EQUAL = (
    "parameter ",
    "optimizers ",
)  # names of what is equal on all replicas; buffers need not be, and extra state is the script's


class _Slot:
    """Stands for tensor number ``index`` in a pickled structure, or for the DTensor that it is a part of."""

    def __init__(self, index: int, part: Part | None = None) -> None:
        self.index, self.part = index, part


def tensors_of(module: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, with their names."""
    named = [(f"parameter {name}", local(p.data)) for name, p in module.named_parameters()]
    return named + [(f"buffer {name}", local(b.data)) for name, b in module.named_buffers()]


def check_movable(model: Any) -> None:
    """At the first join point: at that of the first replacement it would be the end of those who are there.

    Raises:
        ConfigError: some tensor is none of the kind that can be handed over.
    """
    for what, tensor in tensors_of(unwrapped(model)):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj():
            kind = "quantized" if tensor.is_quantized else "a conjugate view" if tensor.is_conj() else tensor.layout
            raise ConfigError(
                f"join_point moves dense tensors, but {what} is {kind}. Keep it out of the module's state."
            )


class TrainingState:
    """Collects (on a survivor) or receives (on a replacement) the state of a replicated training run.

    Args:
        model: a Module or DistributedDataParallel whose parameters are whole on every rank, or sharded as ``shards`` says.
        optimizer: an Optimizer, a sequence of them, or None.
        extra: what else is equal on all ranks; values with ``state_dict`` and ``load_state_dict`` (schedulers, scalers) are
            restored in place, others are returned by the join point.
        shards: of the model; its parts come from a rank that holds the same ones.

    Attributes, once it was packed or its header has come:
        tensors: what is to be moved.
        names: of the tensors.
        digest: of names, shapes, types, layouts and the step, not of values: ranks with the same one may each give some of the
            tensors.
    """

    def __init__(self, model: Any, optimizer: Any, extra: dict[str, Any] | None, shards: Shards | None = None) -> None:
        self._shards = shards
        self.module = unwrapped(model)
        self.optimizers: list[Any] = (
            [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        )
        self.extra = extra or {}
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.digest = 0
        self._check()

    def _check(self) -> None:
        for name, parameter in self.module.named_parameters() if self._shards is None else ():
            if is_sharded(parameter):
                raise ConfigError(
                    f"join_point moves the state of replicas, but parameter {name!r} is sharded (FSDP2 or DTensor): a dead "
                    "rank's part is on some of the others only. Use ftcomm.recovery.Engine, or checkpoints."
                )
        sharding = sys.modules.get("torch.distributed.optim")  # importing it takes longer than many a recovery
        if sharding and any(isinstance(one, sharding.ZeroRedundancyOptimizer) for one in self.optimizers):
            raise ConfigError(
                "join_point can't restore a ZeroRedundancyOptimizer: each rank holds a part of its state that nobody else has. "
                "Use an ordinary optimizer, or checkpoints."
            )

    def model_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return tensors_of(self.module)

    # -- on a survivor -------------------------------------------------------------------------------------------

    def pack(self, more: dict[str, Any]) -> bytes:
        """The header: all but ``tensors``. ``more`` has the step."""
        model = self.model_tensors()
        self.names, self.tensors = [name for name, _ in model], [tensor for _, tensor in model]
        layout = [(name, tuple(t.shape), t.dtype) for name, t in model]
        values = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "modules": extra_states(self.module),
            "extra": {name: value.state_dict() if _stateful(value) else value for name, value in self.extra.items()},
            "more": more,
        }
        rest = {name: self._outline(value, name) for name, value in values.items()}
        tensors = self._shapes(len(model))
        known = (more["step"], layout, [shape[:-1] for shape in tensors])  # not the device, which is each rank's own
        digest = hashlib.blake2b(repr(known).encode(), digest_size=8).digest()
        self.digest = int.from_bytes(digest, "little", signed=True)
        return pickle.dumps({"model": layout, "rest": rest, "tensors": tensors})

    def _outline(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            part = self._shards.part(value) if self._shards is not None and is_sharded(value) else None
            self.tensors.append(local(value))
            self.names.append(name)
            return _Slot(len(self.tensors) - 1, part)
        if isinstance(value, dict):
            return _filled(_empty(value), {key: self._outline(item, f"{name} {key}") for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(self._outline(item, f"{name} {number}") for number, item in enumerate(value))
        return value

    def _shapes(self, first: int) -> list[tuple[str, tuple[int, ...], torch.dtype, tuple[int, ...], str]]:
        rest = zip(self.names[first:], self.tensors[first:], strict=True)
        return [(name, tuple(t.shape), t.dtype, _layout(t), t.device.type) for name, t in rest]

    # -- on a replacement ----------------------------------------------------------------------------------------

    def expect(self, header: bytes) -> None:
        """Reads it and makes room: the model's own memory, new tensors for the rest.

        The memory of a header before this one serves again where it fits: with the same digest, what has come stays.
        """
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
        before = dict(zip(self.names[len(own) :], self.tensors[len(own) :], strict=True))
        rest = []
        for name, shape, dtype, layout, kind in self._received["tensors"]:
            tensor = before.get(name)
            if tensor is None or (tuple(tensor.shape), tensor.dtype, tensor.stride()) != (shape, dtype, layout):
                # A fused update goes through parameter and state in the order of memory.
                tensor = torch.empty_strided(shape, layout, dtype=dtype, device="cpu" if kind == "cpu" else device)
            rest.append(tensor)
        self.tensors = [tensor for _, tensor in model] + rest
        self.names = [name for name, _ in model] + [name for name, *_ in self._received["tensors"]]

    def load(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Puts what came into optimizers, modules and stateful extras; returns the other extras, and what pack() was given."""
        rest = self._inline(self._received["rest"])
        for optimizer, state in zip(self.optimizers, rest["optimizers"], strict=True):
            load_optimizer(optimizer, state)
        set_extra_states(self.module, rest["modules"])
        extra = {}
        for name, value in rest["extra"].items():
            mine: Any = self.extra.get(name)
            if _stateful(mine):
                mine.load_state_dict(value)
            extra[name] = mine if _stateful(mine) else value
        return extra, rest["more"]

    def _inline(self, value: Any) -> Any:
        if isinstance(value, _Slot):
            held = self.tensors[value.index]
            return held if value.part is None or self._shards is None else self._shards.whole(value.part, held)
        if isinstance(value, dict):
            return _filled(copy.copy(value), {key: self._inline(item) for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(self._inline(item) for item in value)
        return value

    @property
    def own(self) -> frozenset[int]:
        """Numbers of the tensors that may differ from rank to rank: all of them have to come from one."""
        return frozenset(n for n, name in enumerate(self.names) if not name.startswith(_EQUAL))

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy: the tensor's own if it fills its memory, else such that each element has a place of its own."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def _empty(value: dict[Any, Any]) -> dict[Any, Any]:
    """Of the same kind: a Counter, a defaultdict, an OrderedDict with its attributes. A plain one if that can't be sent."""
    if type(value) is dict:
        return {}
    try:
        empty = copy.copy(value)
        empty.clear()
        pickle.dumps(empty)
    except Exception:  # noqa: BLE001 - a default that is a lambda, say: the items are what counts
        return {}
    return empty


def _filled(made: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    for key, item in items.items():
        made[key] = item
    return made


def _stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
