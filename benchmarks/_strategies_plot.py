"""The picture of strategies.py: as SWIFT's figure 8a, throughput without failures above, recovery below."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

PARTS = {  # in their order; what the picture calls them, and shades that differ in gray as well
    "detection": ("detection, until a new process is started", "#1b2a41"),
    "start": ("start of the process: imports, model", "#5b7f95"),
    "state": ("state: joining, transfer or loading", "#e0a458"),
    "again": ("lost iterations, done again", "#f4e4c1"),
}


def draw(found: dict[str, list[dict[str, Any]]], throughput: dict[str, list[float]], path: Path) -> None:
    """Bars are medians, points are runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9.5, 8), layout="constrained")

    def points(axis: Any, at: int, values: list[float]) -> None:
        spread = [at + 0.3 * ((number + 0.5) / len(values) - 0.5) for number in range(len(values))]
        axis.plot(spread, values, "o", color="white", markeredgecolor="black", markersize=4, zorder=3)

    def finish(axis: Any, systems: list[str]) -> None:
        axis.set_xticks(range(len(systems)), [system.replace("-", "-\n") for system in systems], fontsize=9)
        axis.grid(axis="y", color="#dddddd")
        axis.set_axisbelow(True)

    systems = [system for system, values in throughput.items() if values]
    for at, system in enumerate(systems):
        height = statistics.median(throughput[system])
        above.bar(at, height, color="#8fa9b8", edgecolor="black", linewidth=0.6, width=0.65)
        points(above, at, throughput[system])
        above.text(at, 0.03, f"{height:.2f}", ha="center", fontsize=9)
    above.axhline(1, color="black", linewidth=0.8, linestyle="--")
    above.set_ylabel("iterations per second over those\nof plain DDP with gloo (ratio)")
    above.set_title("Throughput while nobody dies", fontsize=10)
    finish(above, systems)

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
