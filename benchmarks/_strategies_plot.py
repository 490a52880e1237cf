"""The picture of strategies.py and parallel_recovery.py, as SWIFT's figure 8: throughput above, recovery below."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _plots import bars, finish, points, pyplot

PARTS = {  # in their order; what the picture calls them, and shades that differ in gray as well
    "detection": ("detection, until a new process is started", "#1b2a41"),
    "start": ("start of the process: imports, model", "#5b7f95"),
    "state": ("state: joining, transfer or loading", "#e0a458"),
    "again": ("lost iterations, done again", "#f4e4c1"),
}


def draw(found: dict[str, list[dict[str, Any]]], throughput: dict[str, list[float]], training: str, path: Path) -> None:
    """Bars are medians, points are runs; ``training`` is what runs over gloo for comparison."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(9.5, 8), layout="constrained")
    bars(above, {system: values for system, values in throughput.items() if values}, 2)
    above.axhline(1, color="black", linewidth=0.8, linestyle="--")
    above.set_ylabel(f"iterations per second over those\nof {training} with gloo (ratio)")
    above.set_title("Throughput while nobody dies", fontsize=10)

    systems = [system for system, rows in found.items() if rows and "recovery" in rows[0]]
    highest = 0.0
    for at, system in enumerate(systems):
        base = 0.0
        for part, (name, color) in PARTS.items():
            height = statistics.median(row[part] for row in found[system])
            label = name if at == 0 else None
            below.bar(at, height, bottom=base, color=color, edgecolor="black", linewidth=0.6, width=0.65, label=label)
            base += height
        on = statistics.median(row["next step"] for row in found[system])
        label = "the survivors' next committed step" if at == 0 else None
        below.plot(at - 0.42, on, "D", color="black", markersize=5, zorder=4, label=label)
        totals = [sum(row[part] for part in PARTS) for row in found[system]]
        points(below, at, totals)
        highest = max(highest, *totals, base)
        top = max(*totals, base)
        recovery = statistics.median(row["recovery"] for row in found[system])
        below.annotate(f"{recovery:.2f}", (at, top), (0, 4), textcoords="offset points", ha="center", fontsize=9)
    below.set_ylim(0, 1.12 * highest)
    below.set_ylabel("seconds from the kill until the new process\nis where the run was")
    below.set_title("Recovery; the number is SWIFT's measure, without detection and start (s)", fontsize=10)
    below.legend(fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    finish(below, systems)
    figure.savefig(path, dpi=100)
    plt.close(figure)
