"""What the pictures of the recovery benchmarks have in common: bars are medians, points are runs."""

from __future__ import annotations

import statistics
from typing import Any


def pyplot() -> Any:
    """matplotlib without a screen; imported only when something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def points(axis: Any, at: int, values: list[float]) -> None:
    """Side by side, so that equal ones can be told apart."""
    spread = [at + 0.3 * ((number + 0.5) / len(values) - 0.5) for number in range(len(values))]
    axis.plot(spread, values, "o", color="white", markeredgecolor="black", markersize=4, zorder=3)


def bars(axis: Any, found: dict[str, list[float]], digits: int) -> None:
    """A bar for each name, with its median written into it."""
    for at, values in enumerate(found.values()):
        height = statistics.median(values)
        axis.bar(at, height, color="#8fa9b8", edgecolor="black", linewidth=0.6, width=0.65)
        points(axis, at, values)
        axis.annotate(
            f"{height:.{digits}f}",
            (at, 0),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    finish(axis, list(found))


def finish(axis: Any, names: list[str]) -> None:
    axis.set_xticks(range(len(names)), [name.replace("-", "-\n") for name in names], fontsize=9)
    axis.grid(axis="y", color="#dddddd")
    axis.set_axisbelow(True)
