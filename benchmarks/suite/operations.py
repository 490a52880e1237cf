"""The operations: their buffers, what must come out, how each peer is called, and their bandwidths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
BUS = {  # nccl-tests' factors: bytes over the busiest link for each byte of the size
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}
# Bytes through memory for each byte of the size, all ranks together, if each reads what it needs from where it is and writes
# what it keeps. All-reduce: each slice is read n times and written once (n + 1), then read and written by n - 1 others.
MEMORY = {
    "all_reduce": lambda n: 3 * n - 1,
    "all_gather": lambda n: 2 * (n - 1),  # n ranks read and write n - 1 parts of size / n
    "reduce_scatter": lambda n: n + 1,
    "all_to_all": lambda n: 2 * (n - 1),
    "broadcast": lambda n: 2 * (n - 1),
    "reduce": lambda n: n + 1,
    "send_recv": lambda n: 2,
}
Call = Callable[[], Any]
PIECE = 1 << 20  # elements whose values are made at a time: ranks on one machine share its memory


@dataclass
class Buffers:
    """Of one operation at one size. ``big`` is the size; ``small`` a rank's part of it where there are parts."""

    big: Any
    small: Any
    other: Any  # as big, for results that do not go where the input is


def elements(kind: str, nbytes: int, itemsize: int, ranks: int) -> int:
    """Of ``big``: at least one, and as many for each rank where there are parts."""
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return ranks * max(1, nbytes // itemsize // ranks)
    return max(1, nbytes // itemsize)


def buffers(kind: str, count: int, ranks: int, dtype: str, device: str = "cpu") -> Buffers:
    import torch

    def zeros(number: int) -> Any:
        return torch.zeros(number, dtype=getattr(torch, dtype), device=device)

    parts = kind in ("all_gather", "reduce_scatter", "all_to_all")
    made = Buffers(
        zeros(count),
        zeros(count // ranks if parts else 0),
        zeros(count if kind in ("all_to_all", "send_recv") else 0),
    )
    for tensor in (made.big, made.small, made.other):
        tensor.fill_(0)  # pages of its own, and no shared page of zeros
    return made


def written(kind: str, b: Buffers) -> Any:
    """What a program would have written since the call before. (Of a broadcast on all ranks: so all begin at the same time.)"""
    return b.small if kind == "all_gather" else b.big


def fill(kind: str, b: Buffers, rank: int) -> None:
    """Inputs that tell ranks and places apart; small whole numbers, so that sums have no rounding in any type."""
    for tensor in (b.big, b.small, b.other):
        tensor.fill_(0)
    if kind == "broadcast" and rank != 0:
        return
    tensor = written(kind, b)
    for piece in pieces(len(tensor)):
        tensor[piece].copy_(_pattern(_places(piece), rank))


def pieces(count: int) -> Iterator[slice]:
    for at in range(0, count, PIECE):
        yield slice(at, min(at + PIECE, count))


def right(kind: str, b: Buffers, rank: int, ranks: int, op: str) -> bool:
    """Whether this rank's result is what it must be."""
    import torch

    found = expected(kind, b, rank, ranks, op)
    if found is None:
        return True
    tensor, value = found
    return all(
        torch.equal(tensor[p].cpu().to(torch.float64), value(_places(p)).to(torch.float64)) for p in pieces(len(tensor))
    )


def expected(kind: str, b: Buffers, rank: int, ranks: int, op: str) -> tuple[Any, Callable[[Any], Any]] | None:
    """The tensor with the result, and what must be at which places of it; None: nothing on this rank."""
    import torch

    combine = {"sum": sum, "prod": math.prod, "max": _extreme(torch.maximum), "min": _extreme(torch.minimum)}[op]
    part = len(b.small)
    if kind == "all_reduce" or (kind == "reduce" and rank == 0):
        return b.big, lambda at: combine([_pattern(at, r) for r in range(ranks)])
    if kind == "reduce_scatter":
        return b.small, lambda at: combine([_pattern(at + rank * part, r) for r in range(ranks)])
    if kind == "all_gather":
        return b.big, lambda at: _pattern(at % part, at // part)
    if kind == "all_to_all":
        return b.other, lambda at: _pattern(at % part + rank * part, at // part)
    if kind == "broadcast":
        return b.big, lambda at: _pattern(at, 0)
    if kind == "send_recv" and rank < ranks - ranks % 2:
        return b.other, lambda at: _pattern(at, rank ^ 1)
    return None


def _places(piece: slice) -> Any:
    import torch

    return torch.arange(piece.start, piece.stop)


def _pattern(at: Any, who: Any) -> Any:
    return (at * 7 + who * 3) % 5 + 1


def _extreme(of_two: Callable[[Any, Any], Any]) -> Callable[[list[Any]], Any]:
    def of_all(values: list[Any]) -> Any:
        found = values[0]
        for value in values[1:]:
            found = of_two(found, value)
        return found

    return of_all
