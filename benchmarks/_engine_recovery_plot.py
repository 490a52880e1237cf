"""The picture of engine_recovery.py: throughput while nobody dies, and what a kill costs survivors and replacement."""

from __future__ import annotations

from pathlib import Path

from _plots import bars, pyplot

PARTS = {
    "next step": "from the kill to the survivors' next step (ms)",
    "joining": "from the replacement's asking to its first step (ms)",
    "start": "from the kill to the replacement's asking (ms)",
}


def draw(killed: dict[str, dict[str, list[float]] | None], throughput: dict[str, list[float]], path: Path) -> None:
    """Bars are medians, points are runs and kills. Spans differ by powers of ten: their axes are logarithmic."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    bars(axes[0][0], {name: values for name, values in throughput.items() if values}, 2)
    axes[0][0].axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes[0][0].set_title("Steps per second while nobody dies, over those without an engine", fontsize=10)
    for axis, (part, title) in zip((axes[0][1], axes[1][0], axes[1][1]), PARTS.items(), strict=True):
        found = {name: [1e3 * one for one in parts[part]] for name, parts in killed.items() if parts is not None}
        axis.set_yscale("log")
        # A step less the median step may be less than nothing: 1 ms is as low as the axis goes.
        bars(axis, {name: [max(value, 1.0) for value in values] for name, values in found.items()}, 0)
        axis.set_ylim(bottom=0.7)
        axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)
