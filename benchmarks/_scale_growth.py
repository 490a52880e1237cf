"""How a quantity grows with the number of ranks, over the last factor of 4: what is constant hides it before."""

from __future__ import annotations

import math

FACTOR = 4


def judged_between(by_ranks: dict[int, float]) -> tuple[int, int]:
    many = max(by_ranks)
    return max((n for n in by_ranks if n * FACTOR <= many), default=min(by_ranks)), many


def exponent(by_ranks: dict[int, float]) -> float:
    """e where the quantity grows as ranks ** e: 0 is not at all, 1 is linear."""
    few, many = judged_between(by_ranks)
    if by_ranks[few] <= 0 or by_ranks[many] <= 0:
        return 0.0 if by_ranks[few] == by_ranks[many] else math.inf
    return math.log(by_ranks[many] / by_ranks[few]) / math.log(many / few)


def of_logarithm(few: int, many: int) -> float:
    """The exponent that log n has between the two."""
    return math.log(math.log(many) / math.log(few)) / math.log(many / few)


def verdict(by_ranks: dict[int, float]) -> str:
    few, many = judged_between(by_ranks)
    if many < FACTOR * few:
        return "(too near to say)"
    e = exponent(by_ranks)
    if e <= 0.05:
        return "bounded"
    if e <= of_logarithm(few, many) * 1.25 + 0.02:
        return "as log n"
    if e < 0.8:
        return "more than log n, less than n"
    if e < 1.25:
        return "as n (or n log n)"
    return "more than n"


def table(title: str, quantities: dict[str, dict[int, float]]) -> str:
    lines = [f"{title:44}{'from':>8}{'to':>8}{'times':>10}{'exponent':>10}{'log n has':>11}  growth"]
    for name, by_ranks in quantities.items():
        few, many = judged_between(by_ranks)
        if few == many:
            continue
        times = by_ranks[many] / by_ranks[few] if by_ranks[few] else math.inf
        own, log = exponent(by_ranks), of_logarithm(few, many)
        lines.append(f"{name:44}{few:>8}{many:>8}{times:>10.2f}{own:>10.2f}{log:>11.2f}  {verdict(by_ranks)}")
    return "\n".join(lines)
