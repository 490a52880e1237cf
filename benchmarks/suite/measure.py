"""The measuring loop: checks every peer's values, then interleaves their rounds."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from suite.operations import Call, buffers, elements, fill, right, written

MOST_CALLS = 2000
MOST_PAUSES = 20  # in a round
WARM = 2  # rounds


class WrongResult(RuntimeError):
    """A peer's values are not what they must be: nothing is measured then."""


@dataclass
class _Before:
    """What a rank does before each call, and how many calls a round has then."""

    run: Callable[[], None]
    most: int


@dataclass
class Cell:
    """One size: by peer the seconds per call of each round, of the slowest rank, and the processors' seconds of all ranks."""

    nbytes: int  # what the ranks have
    times: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # peers that cannot do it, and why
    asked: int = 0  # bytes: 8 of them in parts for three ranks are 12

    @classmethod
    def of(cls, row: dict[str, Any]) -> Cell:
        """From a row of a JSON file, also of one from before ``asked``, which a folder of results may hold."""
        asked = row.get("asked", row["bytes"])
        return cls(row["bytes"], row["seconds"], row["processor_seconds"], row["refused"], asked)

    def median(self, peer: str) -> float:
        return statistics.median(self.times[peer])

    def ratio(self, peer: str, to: str) -> tuple[float, float, float]:
        """The median of ``peer``'s time over ``to``'s of the same round, and its 95 % confidence interval."""
        return with_interval([a / b for a, b in zip(self.times[peer], self.times[to], strict=True)])


def with_interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the order statistics that have it between them with at least 95 % (all values if there are few)."""
    ordered, n = sorted(values), len(values)
    below, at, ways = 0.0, -1, 0.5**n
    while at + 1 < n // 2 and below + ways <= 0.025:
        below += ways
        at += 1
        ways *= (n - at) / (at + 1)
    low = max(at, 0)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def measured(kind: str, comm: Any, peers: dict[str, Any], args: argparse.Namespace) -> Iterator[Cell]:
    """Collective: every rank goes through the same cells."""
    for nbytes in args.sizes:
        count = elements(kind, nbytes, itemsize(args.dtype), comm.size)
        b = buffers(kind, count, comm.size, args.dtype, args.device)
        cell = Cell(count * itemsize(args.dtype), asked=nbytes) if kind != "barrier" else Cell(0)
        calls: dict[str, tuple[Call, int]] = {}
        for name, peer in peers.items():
            call = _until_there(peer.call(kind, b), args.device)
            if reason := _checked(kind, name, call, b, comm, args):
                cell.refused[name] = reason
                continue
            for tensor in (b.big, b.small, b.other):
                tensor.fill_(0)  # sums of zeros do not grow from call to call
            calls[name] = call, _how_many(call, comm, args.budget)
        before = _before(kind, b, args)
        order = random.Random(nbytes)  # the same on all ranks
        mine: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(args.rounds + WARM):
            for name in order.sample(sorted(calls), len(calls)):
                call, number = calls[name]
                mine[name].append(_round(call, number, comm, before))
        messages = 2 if kind == "send_recv" else 1
        for name, rounds in mine.items():
            elapsed, used = zip(*rounds[WARM:], strict=True)
            cell.times[name] = [s / messages for s in slowest(elapsed, comm)]
            cell.cpu[name] = [s / messages for s in _of_all(used, comm, "sum")]
        yield cell


def _until_there(call: Call, device: str) -> Call:
    """On a GPU a call returns before its result is there."""
    if device == "cpu":
        return call
    import torch

    def whole() -> None:
        call()
        torch.cuda.current_stream().synchronize()

    return whole


def _checked(kind: str, name: str, call: Call, b: Any, comm: Any, args: argparse.Namespace) -> str:
    """Why this peer can't do it, or ''."""
    fill(kind, b, comm.rank)
    reason = ""
    try:
        call()
    except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] or type(error).__name__
    if _any(bool(reason), comm):
        return reason or "refused by another rank"
    wrong = not right(kind, b, comm.rank, comm.size, args.op)
    if _any(wrong, comm):
        where = "this" if wrong else "another"
        raise WrongResult(f"{name}'s {kind} of {len(b.big)} x {args.dtype} has given wrong values on {where} rank")
    return ""


def _how_many(call: Call, comm: Any, budget: float) -> int:
    """Calls in a round, from how long a few take: twice, or one that was held up would make all rounds short."""
    number = 1
    while True:
        seconds = min(_agreed(_round(call, number, comm)[0], comm) for _ in range(2))
        if seconds * number >= budget / 4 or number >= MOST_CALLS:
            return max(1, min(MOST_CALLS, round(budget / seconds)))
        number *= 4


def _before(kind: str, b: Any, args: argparse.Namespace) -> _Before | None:
    if not (args.fresh or args.pause > 0):
        return None
    tensor = written(kind, b)

    def before() -> None:
        until = time.perf_counter() + args.pause / 1e3
        while time.perf_counter() < until:
            pass
        if args.fresh:
            tensor.fill_(0)

    return _Before(before, MOST_PAUSES if args.pause > 0 else MOST_CALLS)


def _round(call: Call, number: int, comm: Any, before: _Before | None = None) -> tuple[float, float]:
    """Seconds per call, and those that processors spent on this process, its threads and its system calls meanwhile."""
    comm.barrier()
    if before is not None:
        return _call_by_call(call, min(number, before.most), before.run)
    used, start = time.process_time(), time.perf_counter()
    for _ in range(number):
        call()
    elapsed = time.perf_counter() - start
    return elapsed / number, (time.process_time() - used) / number


def _call_by_call(call: Call, number: int, before: Callable[[], None]) -> tuple[float, float]:
    """The same of the calls alone."""
    elapsed = used = 0.0
    for _ in range(number):
        before()
        used -= time.process_time()
        elapsed -= time.perf_counter()
        call()
        elapsed += time.perf_counter()
        used += time.process_time()
    return elapsed / number, used / number


def slowest(seconds: Sequence[float], comm: Any) -> list[float]:
    return _of_all(seconds, comm, "max")


def _of_all(seconds: Sequence[float], comm: Any, op: str) -> list[float]:
    import numpy as np

    values = np.array(seconds)
    comm.all_reduce(values, op)
    return [float(v) for v in values]


def _agreed(seconds: float, comm: Any) -> float:
    return slowest([seconds], comm)[0]


def _any(here: bool, comm: Any) -> bool:
    return slowest([float(here)], comm)[0] > 0


def itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)
