"""Checkpoints of sharded models hold whole tensors: gathered by the rank that writes them, cut again by each that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ftcomm.communicator import Communicator
from ftcomm.errors import ConfigError, PeerFailure
from ftcomm.torch.blocks import Blocks
from ftcomm.torch.optimizers import load_optimizer, parameters_of, same_types
from ftcomm.torch.shards import Part, Shards, is_sharded, local, reshard

__all__ = ["Gathered"]

_TAG = 0x676174  # "gat"


class Gathered:
    """A sharded model and its optimizer, as state dicts of whole tensors.

    Args:
        shards: of the model.
        rank: this one.
        group: all ranks of the job; None: there is one.
    """

    def __init__(self, module: Any, optimizer: Any, shards: Shards, rank: int, group: Communicator | None) -> None:
        self._module, self._optimizer, self._shards, self._rank, self._group = module, optimizer, shards, rank, group

    # -- to a file -----------------------------------------------------------------------------------------------

    def gather(self, alive: tuple[int, ...]) -> dict[str, Any] | None:
        """Collective. Model and optimizer for the lowest rank, None for the others.

        Shards go from the lowest rank that holds them to the one that writes. Of a death in it only the two ends know, and it is
        no concern of the others': who sends is done when it has sent, or has nobody to send to.

        Raises:
            PeerFailure: on all ranks; ``alive`` has not all shards. Or on the rank that writes; somebody died before all of its
                shards had come.
        """
        self._check_whole(alive)
        reshard(self._module)
        state = {"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}
        self._check(state["optimizer"])
        found: list[Any] = []
        _each(state, found.append)
        parts = [self._shards.part(value) for value in found]
        writer = min(alive)
        if self._rank != writer:
            holder = min(rank for rank in self._shards.twins(self._rank) if rank in alive)
            if self._rank == holder and writer not in self._shards.twins(self._rank):
                self._send([local(value) for value in found], writer)
            return None
        whole = [torch.empty(part.shape, dtype=value.dtype) for part, value in zip(parts, found, strict=True)]
        self._place(whole, parts, [local(value) for value in found], writer)
        holders = {min(rank for rank in self._shards.twins(one) if rank in alive): None for one in alive}
        failures = [
            failure for holder in holders if holder != writer and (failure := self._receive(whole, parts, holder))
        ]
        if failures:
            raise failures[0]
        made = iter(whole)
        return dict(_each(state, lambda _: next(made)))

    def _check_whole(self, alive: tuple[int, ...]) -> None:
        """By what all know alike, before anything is sent: what nobody has would be whatever the writer's memory holds."""
        lost = [
            rank for rank in range(self._shards.world_size) if not any(one in alive for one in self._shards.twins(rank))
        ]
        if lost:
            raise PeerFailure(
                f"Nobody who is there has the shards of rank {', '.join(map(str, lost))}, and a checkpoint needs all of them.",
                ranks=lost,
                operation="gathering of a checkpoint",
            )

    def _send(self, held: list[torch.Tensor], writer: int) -> None:
        assert self._group is not None
        try:
            blocks = Blocks(held)
            for number in range(len(blocks.plan)):
                self._group.send(blocks.read(number), writer, _TAG)
        except PeerFailure:
            pass  # there is no checkpoint then; the next step finds the death

    def _receive(self, whole: list[torch.Tensor], parts: list[Part], holder: int) -> PeerFailure | None:
        """Failures are for later: other ranks are waiting to be received from."""
        assert self._group is not None
        held = []
        for tensor, part in zip(whole, parts, strict=True):
            dimension, _, length = self._shards.piece(part, holder)
            shape = list(part.shape)
            shape[dimension] = length
            held.append(torch.empty(shape, dtype=tensor.dtype))
        try:
            blocks = Blocks(held)
            for number in range(len(blocks.plan)):
                room = blocks.room(number)
                self._group.recv(room, holder, _TAG)
                blocks.put(number, room)
        except PeerFailure as failure:
            return failure
        self._place(whole, parts, held, holder)
        return None

    def _place(self, whole: list[torch.Tensor], parts: list[Part], held: list[torch.Tensor], rank: int) -> None:
        with torch.no_grad():
            for tensor, part, mine in zip(whole, parts, held, strict=True):
                tensor.narrow(*self._shards.piece(part, rank)).copy_(mine)

    def _check(self, state: dict[str, Any]) -> None:
        parameters = parameters_of(self._optimizer)
        for index, values in state["state"].items():
            for name, value in values.items():
                if is_sharded(value) and value.shape != parameters[index].shape:
                    raise ConfigError(
                        f"The optimizer's {name} of parameter {index} is sharded, and has another shape than the parameter: it "
                        "can't be in a checkpoint yet. Use another optimizer, or no checkpoint_dir."
                    )

    # -- from a file ---------------------------------------------------------------------------------------------

    def load(self, saved: dict[str, Any]) -> None:
        """Model and optimizer get their shards of what :meth:`gather` gave, or an unsharded model's ``state_dict()``."""
        reshard(self._module)
        own = self._module.state_dict()
        self._module.load_state_dict(
            {name: self._cut(name, own.get(name), value) for name, value in saved["model"].items()}
        )
        parameters = parameters_of(self._optimizer)
        numbers = [number for group in saved["optimizer"]["param_groups"] for number in group["params"]]
        like = dict(zip(numbers, parameters, strict=False))  # load_state_dict() says if they do not fit
        state = {
            number: {
                name: self._cut(f"{name} of parameter {number}", like.get(number), value)
                if isinstance(value, torch.Tensor) and number in like and value.shape == like[number].shape
                else value
                for name, value in values.items()
            }
            for number, values in saved["optimizer"]["state"].items()
        }
        load_optimizer(self._optimizer, {**saved["optimizer"], "state": state}, same_types(saved["model"], own))

    def _cut(self, name: str, like: Any, value: Any) -> Any:
        if not is_sharded(like):
            return value
        if value.shape != like.shape:
            raise ConfigError(
                f"{name} has shape {list(like.shape)}, and {list(value.shape)} in the checkpoint: it is of another model."
            )
        part = self._shards.part(like)
        mine = value.narrow(*self._shards.piece(part, self._rank)).clone(memory_format=torch.contiguous_format)
        return self._shards.whole(part, mine.to(like.device))


def _each(value: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of the containers, with the DTensors in them replaced."""
    if is_sharded(value):
        return replace(value)
    if isinstance(value, dict):
        return {key: _each(item, replace) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(item, replace) for item in value)
    return value
