"""Which machines share a group, so that only messages between groups are logged (SWIFT, section 5.3).

Machines stand in pipeline order, and only neighbours exchange messages. If one machine of a group fails, the whole group replays
from the last checkpoint; a boundary inside a group is not logged. Fewer logged boundaries: less storage, longer replay.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ftcomm.errors import ConfigError
from ftcomm.recovery._numbers import count, in_bytes, in_seconds, number

__all__ = ["Grouping", "exhaustive", "from_stages", "plan_groups"]

EXHAUSTIVE_MACHINES = 10
PRICES = 48  # steps of halving


@dataclass(frozen=True)
class Grouping:
    """A grouping and what it costs.

    Attributes:
        groups: the machines of each group, in pipeline order.
        replay_seconds: expected seconds to replay one lost iteration, each machine failing equally often.
        recovery_seconds: expected seconds of replay after a failure: ``replay_seconds`` for half a checkpoint interval.
        log_bytes: bytes of log that lie there when the next checkpoint makes them garbage.
        degrees: for each group, by how many a replay is shared (1 without parallel recovery).
        reason: why it is this grouping, in words.
    """

    groups: tuple[tuple[int, ...], ...]
    replay_seconds: float
    recovery_seconds: float
    log_bytes: float
    degrees: tuple[int, ...]
    reason: str

    def group_of(self, machine: int) -> int:
        """The number of the group that ``machine`` is in."""
        starts = [group[0] for group in self.groups]
        if not isinstance(machine, int) or not 0 <= machine <= self.groups[-1][-1]:
            raise ConfigError(f"machine={machine!r} is not one of the machines 0 to {self.groups[-1][-1]}.")
        return bisect.bisect_right(starts, machine) - 1

    def logs(self, sender: int, receiver: int) -> bool:
        """Whether messages between these two machines are to be logged."""
        return self.group_of(sender) != self.group_of(receiver)


class _Problem:
    """The checked input. A grouping is the ascending list of its logged boundaries; boundary i lies behind machine i."""

    def __init__(
        self,
        seconds: Sequence[float],
        sizes: Sequence[float],
        log_limit: float,
        bandwidth: float,
        checkpoint_interval: int,
        degree: int | None,
        micro_batches: int | None,
    ) -> None:
        seconds, sizes = _numbers("seconds", seconds, "seconds"), _numbers("sizes", sizes, "bytes")
        if not seconds:
            raise ConfigError("seconds is empty: give the replay time of at least one machine.")
        if len(sizes) != len(seconds) - 1:
            raise ConfigError(
                f"{len(seconds)} machines in a pipeline have {len(seconds) - 1} boundaries, but sizes has {len(sizes)} "
                "entries. Give the bytes per iteration between each machine and the next one, both directions together."
            )
        log_limit = number("log_limit", log_limit, "bytes", zero=True, infinite=True)
        bandwidth = number("bandwidth", bandwidth, "bytes per second", infinite=True)
        checkpoint_interval = count("checkpoint_interval", checkpoint_interval, "iterations")
        if degree is not None:
            degree = count("degree", degree, "replicas that replay together (None: as many as there are machines for)")
        if micro_batches is not None:
            micro_batches = count("micro_batches", micro_batches, "micro-batches")
        self.machines = len(seconds)
        self.sizes = sizes
        self.limit = log_limit
        self.interval = checkpoint_interval
        self.most = math.inf if degree is None else degree
        self.micro_batches = micro_batches
        # Sums of all before, so that the time of any group is two subtractions.
        self._computing = [0.0, *itertools.accumulate(seconds)]
        self._sending = [0.0, *itertools.accumulate(size / bandwidth for size in sizes)]

    def degree(self, machines: int) -> int:
        found = int(min(self.machines // machines, self.most))
        return found if self.micro_batches is None else min(found, self.micro_batches)

    def weight(self, start: int, end: int) -> float:
        """Replay time of the group of machines start..end-1 times its number of machines, per iteration."""
        length, degree = end - start, self.degree(end - start)
        speedup = degree if self.micro_batches is None else self.micro_batches / -(-self.micro_batches // degree)
        computing = self._computing[end] - self._computing[start]
        return (computing + (self._sending[end - 1] - self._sending[start])) * (length / speedup)

    def log_bytes(self, cuts: Iterable[int]) -> float:
        return sum(self.sizes[cut] for cut in cuts) * self.interval

    def replay(self, cuts: Sequence[int]) -> float:
        return sum(self.weight(start, end) for start, end in _spans(cuts, self.machines)) / self.machines

    def grouping(self, cuts: Sequence[int], reason: str) -> Grouping:
        spans, replay = _spans(cuts, self.machines), self.replay(cuts)
        return Grouping(
            groups=tuple(tuple(range(start, end)) for start, end in spans),
            replay_seconds=replay,
            recovery_seconds=replay * self.interval / 2,
            log_bytes=self.log_bytes(cuts),
            degrees=tuple(self.degree(end - start) for start, end in spans),
            reason=reason,
        )


def plan_groups(
    seconds: Sequence[float],
    sizes: Sequence[float],
    *,
    log_limit: float,
    bandwidth: float,
    checkpoint_interval: int,
    degree: int | None = 1,
    micro_batches: int | None = None,
    improve: bool = True,
) -> Grouping:
    """The grouping with a short expected replay whose log fits into ``log_limit``; O(N^2) for N machines.

    Begins with each machine by itself and merges neighbours, those first whose merging adds the least replay time per byte saved
    (SWIFT, section 5.3). Equal input gives an equal result on every rank. If not even one logged boundary fits, all machines are
    one group and nothing is logged.

    Args:
        seconds: for each machine, in pipeline order, the time it computes per iteration: that is how long its replay takes.
        sizes: for each machine but the last, the bytes per iteration between it and the next one, both directions together.
        log_limit: bytes that the logs of all machines may take together; ``math.inf`` for no limit.
        bandwidth: between two machines, bytes per second.
        checkpoint_interval: iterations between two global checkpoints; at each one the log is dropped.
        degree: by how many a replay is shared at most; 1: no parallel recovery; None: as many as N machines allow.
        micro_batches: per iteration, for parallel recovery: they bound its degree, and the largest share decides.
        improve: also try what SWIFT does not: groupings that are best for some price per byte, and logging boundaries again that
            turn out to fit. Never a worse result; but a larger ``log_limit`` may then give a slightly longer replay.
    """
    problem = _Problem(seconds, sizes, log_limit, bandwidth, checkpoint_interval, degree, micro_batches)
    cuts, how = _merge(problem), "merging neighbours"
    if improve and len(cuts) < problem.machines - 1:
        priced = _priced(problem)
        found = [(how, cuts), (how + " and logging again what fits", _reopen(problem, cuts))]
        found += [("a price", priced), ("a price and logging again what fits", _reopen(problem, priced))]
        how, cuts = min(found, key=lambda one: (problem.replay(one[1]), problem.log_bytes(one[1])))
    return problem.grouping(cuts, _reason(problem, cuts, how))


def exhaustive(
    seconds: Sequence[float],
    sizes: Sequence[float],
    *,
    log_limit: float,
    bandwidth: float,
    checkpoint_interval: int,
    degree: int | None = 1,
    micro_batches: int | None = None,
) -> Grouping:
    """The best grouping of all, by trying every one; for at most 10 machines, and for comparison with :func:`plan_groups`.

    It tries all groups of consecutive machines. Others cannot be better in a pipeline: split into its consecutive runs, such a
    group replays no longer and logs the same, since machines that are not neighbours exchange nothing.
    """
    problem = _Problem(seconds, sizes, log_limit, bandwidth, checkpoint_interval, degree, micro_batches)
    boundaries = problem.machines - 1
    if problem.machines > EXHAUSTIVE_MACHINES:
        raise ConfigError(
            f"{problem.machines} machines have {2**boundaries} groupings; exhaustive() tries them for at most "
            f"{EXHAUSTIVE_MACHINES} machines. Use plan_groups()."
        )
    every = (cuts for length in range(boundaries + 1) for cuts in itertools.combinations(range(boundaries), length))
    fitting = [cuts for cuts in every if problem.log_bytes(cuts) <= problem.limit]
    best = min(fitting, key=lambda cuts: (problem.replay(cuts), problem.log_bytes(cuts)))
    reason = f"The shortest replay of the {len(fitting)} groupings whose log fits, of {2**boundaries}."
    return problem.grouping(best, reason)


def from_stages(
    stage_seconds: Sequence[float], stage_sizes: Sequence[float], stages: Sequence[int], *, bandwidth: float = math.inf
) -> tuple[list[float], list[float]]:
    """``(seconds, sizes)`` of machines for :func:`plan_groups` from those of pipeline stages, several on each machine.

    Args:
        stage_seconds: for each stage, the time it computes per iteration.
        stage_sizes: for each stage but the last, the bytes per iteration between it and the next one, both directions together.
        stages: how many consecutive stages each machine has.
        bandwidth: between stages of one machine, bytes per second.
    """
    stage_seconds = _numbers("stage_seconds", stage_seconds, "seconds")
    stage_sizes = _numbers("stage_sizes", stage_sizes, "bytes")
    bandwidth = number("bandwidth", bandwidth, "bytes per second", infinite=True)
    stages = [count(f"stages[{machine}]", length, "stages") for machine, length in enumerate(stages)]
    if sum(stages) != len(stage_seconds) or len(stage_sizes) != len(stage_seconds) - 1:
        raise ConfigError(
            f"stages adds up to {sum(stages)}, with {len(stage_seconds)} stage_seconds and {len(stage_sizes)} stage_sizes. "
            "Give one time for each stage and one size for each stage but the last."
        )
    ends = list(itertools.accumulate(stages))
    spans = list(zip([0, *ends], ends, strict=False))
    seconds = [sum(stage_seconds[a:b]) + sum(stage_sizes[a : b - 1]) / bandwidth for a, b in spans]
    return seconds, [stage_sizes[end - 1] for end in ends[:-1]]


def _merge(problem: _Problem) -> list[int]:
    """The boundaries that are left when the log fits: N-1 rounds at most, each looks at every boundary that is left."""
    cuts = list(range(problem.machines - 1))
    while problem.log_bytes(cuts) > problem.limit:
        bounds = [-1, *cuts, problem.machines - 1]
        worst, chosen = math.inf, -1
        for i, cut in enumerate(cuts):
            size = problem.sizes[cut]
            if size == 0:  # merging would save nothing
                continue
            price = _price(problem.weight, bounds[i] + 1, cut + 1, bounds[i + 2] + 1) / size
            if price < worst or chosen < 0:
                worst, chosen = price, i
        del cuts[chosen]
    return cuts


def _priced(problem: _Problem) -> list[int]:
    """The grouping with the least replay time plus price times log bytes, for the lowest price at which the log fits.

    For a given price the best grouping is a shortest path over the boundaries. The price is found by halving an interval a fixed
    number of times.
    """
    fits: list[int] = []
    low, high = 0.0, 2 * problem.weight(0, problem.machines) / min(size for size in problem.sizes if size)
    for _ in range(PRICES):
        price = (low + high) / 2
        cuts = _shortest(problem, price)
        if problem.log_bytes(cuts) <= problem.limit:
            high, fits = price, cuts
        else:
            low = price
    return fits


def _shortest(problem: _Problem, price: float) -> list[int]:
    costs, begins = [0.0], [0]
    for end in range(1, problem.machines + 1):
        least, begin = math.inf, 0
        for start in range(end):
            cost = costs[start] + problem.weight(start, end)
            if cost < least:
                least, begin = cost, start
        costs.append(least + price * problem.sizes[end - 1] if end < problem.machines else least)
        begins.append(begin)
    cuts: list[int] = []
    start = begins[-1]
    while start:
        cuts.append(start - 1)
        start = begins[start]
    return cuts[::-1]


def _reopen(problem: _Problem, cuts: Sequence[int]) -> list[int]:
    """With boundaries put back that fit, the one that saves most replay first."""
    cuts = list(cuts)
    while True:
        room = problem.limit - problem.log_bytes(cuts)
        bounds = [-1, *cuts, problem.machines - 1]
        most, chosen = 0.0, -1
        for last, end in itertools.pairwise(bounds):
            for cut in range(last + 1, end):
                if problem.sizes[cut] * problem.interval <= room:
                    saved = _price(problem.weight, last + 1, cut + 1, end + 1)
                    if saved > most:
                        most, chosen = saved, cut
        if chosen < 0:
            return cuts
        bisect.insort(cuts, chosen)


def _price(weight: Callable[[int, int], float], start: int, middle: int, end: int) -> float:
    """How much longer (times N) the replay is when start..middle-1 and middle..end-1 are one group."""
    return weight(start, end) - weight(start, middle) - weight(middle, end)


def _spans(cuts: Sequence[int], machines: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *(cut + 1 for cut in cuts), machines]))


def _reason(problem: _Problem, cuts: Sequence[int], how: str) -> str:
    boundaries, limit = problem.machines - 1, in_bytes(problem.limit)
    everything = problem.log_bytes(range(boundaries))
    if problem.machines == 1:
        return "One machine: there is nothing to log."
    if len(cuts) == boundaries:
        return f"The messages between all machines fit: {in_bytes(everything)} of {limit} per checkpoint interval."
    text = f"Logging between all machines takes {in_bytes(everything)} per checkpoint interval, more than {limit}"
    if not cuts:
        return f"{text}, and not even one boundary fits: all machines roll back together and nothing is logged."
    alone, together = problem.replay(range(boundaries)), problem.replay(())
    return (
        f"{text}: {boundaries - len(cuts)} of {boundaries} boundaries are not logged (found by {how}). A lost iteration takes "
        f"{in_seconds(problem.replay(cuts))} to replay; with all logged {in_seconds(alone)}, with none {in_seconds(together)}."
    )


def _numbers(name: str, values: Sequence[Any], unit: str) -> list[float]:
    try:
        found = list(values)
    except TypeError:
        raise ConfigError(f"{name}={values!r} must be a list of {unit}, one number for each.") from None
    return [number(f"{name}[{i}]", value, unit, zero=True) for i, value in enumerate(found)]
