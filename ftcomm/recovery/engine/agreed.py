"""Do all have the same? What all ranks say of theirs, and whether those who go on from a checkpoint go on from the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ftcomm.errors import Mismatch, PeerFailure
from ftcomm.torch.blocks import digest

__all__ = ["check_same", "told_by_all"]


def told_by_all(everybody: Any, mine: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Collective, of all living ranks of the job: what each one says, by rank, and who has said something, the same on all."""
    own = torch.tensor(mine, dtype=torch.int64)
    found = torch.zeros(everybody.size, own.numel(), dtype=torch.int64)
    while True:
        try:
            return found, everybody.all_gather(found, own).contributors
        except PeerFailure:  # on all ranks: somebody has died in it, and is not in the next one
            continue


def check_same(everybody: Any, step: int, saved: dict[str, Any] | None) -> None:
    """Collective, of all living ranks of the job: the checkpoints that some have read are of one history.

    By what is in them, and not by the files' bytes: two ranks may have written the same state in different ways.

    Raises:
        Mismatch: on all ranks.
    """
    found, there = told_by_all(everybody, [saved is not None, 0 if saved is None else _digest(saved)])
    having = [rank for rank in there if found[rank][0]]
    odd = [rank for rank in having if found[rank][1] != found[having[0]][1]]
    if odd:
        raise Mismatch(
            f"The checkpoints of step {step} that rank {', '.join(map(str, odd))} has read differ from rank {having[0]}'s: they "
            "are of different runs. Leave the one to go on from, and remove the others' files of that step, or copy it there.",
            ranks=odd,
            operation="start from a checkpoint",
        )


def _digest(saved: dict[str, Any]) -> int:
    parts: list[int] = []
    _add(parts, {"model": saved["model"], "optimizer": saved["optimizer"]})
    return digest(torch.tensor(parts, dtype=torch.int64))


def _add(parts: list[int], value: Any) -> None:
    """Dictionaries in the order of their keys: that of insertion is the writer's."""
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            _add(parts, repr(key))
            _add(parts, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(parts, item)
    elif isinstance(value, torch.Tensor):
        parts.append(digest(value))
    elif isinstance(value, (int, float, str, bool, type(None))):
        parts.append(digest(torch.tensor(list(repr(value).encode()), dtype=torch.uint8)))
