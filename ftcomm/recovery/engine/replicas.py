"""Are the replicas equal, bit for bit? Asked after each recovery."""

from __future__ import annotations

from typing import Any

import torch

from ftcomm.errors import Mismatch
from ftcomm.recovery.engine.agreed import told_by_all
from ftcomm.torch.blocks import digest
from ftcomm.torch.shards import Shards, local
from ftcomm.torch.state import TrainingState

__all__ = ["check_replicas"]


def check_replicas(
    everybody: Any, model: Any, optimizers: list[Any], shards: Shards | None = None, buffers: bool = True
) -> int:
    """Collective, of all living ranks of the job. With ``shards`` those are compared that hold the same ones.

    ``buffers``: they are made equal in each step; else each rank may have its own.

    Returns the number of tensors that were compared.

    Raises:
        Mismatch: on all ranks; names the first tensor that differs and the ranks that differ from the lowest one.
    """
    named = [one for one in _named(model, optimizers, shards) if buffers or not one[0].startswith("buffer ")]
    digests, there = told_by_all(everybody, [digest(local(tensor)) for _, tensor in named])
    groups = [there] if shards is None else {shards.twins(rank): None for rank in there}
    for index, (name, _) in enumerate(named):
        for group in groups:
            twins = [rank for rank in group if rank in there]
            odd = [rank for rank in twins if digests[rank][index] != digests[twins[0]][index]]
            if odd:
                raise Mismatch(
                    f"After the recovery {name} on rank {', '.join(map(str, odd))} differs from rank {twins[0]}'s: the replicas "
                    "were not equal before, or something in the script changes them apart from each other. Start again from a "
                    "checkpoint.",
                    ranks=odd,
                    operation="check of replicas",
                )
    return len(named)


def _named(model: Any, optimizers: list[Any], shards: Shards | None) -> list[tuple[str, Any]]:
    state = TrainingState(model, optimizers, None, shards)
    named = list(state.model_tensors())
    for number, optimizer in enumerate(optimizers):
        for index, values in sorted(optimizer.state_dict()["state"].items()):
            tensors = [(key, value) for key, value in sorted(values.items()) if isinstance(value, torch.Tensor)]
            named += [(f"optimizer {number}'s {key} of parameter {index}", value) for key, value in tensors]
    return named
