"""scale.py's picture: real processes above, the simulator below; logarithmic ranks."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from _plots import pyplot

REAL = ("start", "agree", "barrier", "detect", "shrink")
COLORS = {"ftcomm": "#1b6ca8", "hosts": "#6fa8dc", "ulfm": "#d1495b"}
NAMES = {"ftcomm": "ftcomm", "hosts": "ftcomm, tcp between hosts", "ulfm": "Open MPI"}
SIMULATED = (("seconds", "seconds"), ("messages", "messages in all"), ("rounds", "rounds"))


def draw(path: Path, figures: dict[str, dict[str, list[dict[str, float]]]], rows: list[dict[str, Any]]) -> None:
    links = sorted({r["link_us"] for r in rows})
    plt = pyplot()
    height = bool(figures) + bool(rows)
    figure, axes = plt.subplots(height, 5, figsize=(20, 4.2 * height), squeeze=False, layout="constrained")
    at = 0
    if figures:
        for axis, name in zip(axes[0], REAL, strict=True):
            _real(axis, name, figures)
        axes[0][0].legend(fontsize=8)
        at = 1
    if rows:
        for axis, (key, label) in zip(axes[at], SIMULATED, strict=False):
            _simulated(axis, key, label, rows, links)
        _simulated(axes[at][3], "most_received", "messages to one rank", rows, links[:1])
        _memory(axes[at][4], rows)
        handles, labels = axes[at][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=7)
    figure.savefig(path, dpi=130)


def _real(axis: Any, name: str, figures: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    first: tuple[int, float] | None = None
    sizes: list[int] = []
    for system, by_size in figures.items():
        have = {int(n): [1e3 * r[name] for r in rounds] for n, rounds in by_size.items() if rounds}
        if not have:
            continue
        middle = {n: statistics.median(v) for n, v in have.items()}
        axis.plot(list(middle), list(middle.values()), "o-", ms=4, color=COLORS[system], label=NAMES[system])
        axis.fill_between(
            list(have),
            [min(v) for v in have.values()],
            [max(v) for v in have.values()],
            color=COLORS[system],
            alpha=0.2,
        )
        first = first or next(iter(middle.items()))
        sizes = sorted({*sizes, *have})
    if first is not None:
        n0, value = first
        axis.plot(sizes, [value * math.log(n) / math.log(n0) for n in sizes], "k:", lw=1, label="as log n")
        axis.plot(sizes, [value * n / n0 for n in sizes], "k--", lw=0.7, label="as n")
    axis.set(xscale="log", yscale="log", xlabel="processes of one machine", ylabel="ms", title=name)
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.grid(alpha=0.3)


def _simulated(axis: Any, key: str, label: str, rows: list[dict[str, Any]], links: list[float]) -> None:
    names = list(dict.fromkeys(name for r in rows for name in r["operations"]))
    colors = pyplot().get_cmap("tab10")
    for link, style in zip(links, ("o-", "s--", "^:", "x-."), strict=False):
        for number, name in enumerate(names):
            have = {
                r["ranks"]: r["operations"][name][key] for r in rows if r["link_us"] == link and name in r["operations"]
            }
            text = f"{name}, {link:g} us"
            axis.plot(list(have), list(have.values()), style, ms=3, color=colors(number), label=text)
    axis.set(xscale="log", yscale="log", xlabel="simulated ranks", ylabel=label, title=label)
    axis.grid(alpha=0.3)


def _memory(axis: Any, rows: list[dict[str, Any]]) -> None:
    have = {r["ranks"]: r["bytes_per_rank"] / 1024 for r in rows if r["whole_nodes"]}
    axis.plot(list(have), list(have.values()), "o-", ms=3, color="#1b6ca8")
    axis.set(xscale="log", yscale="log", xlabel="simulated ranks", ylabel="KiB", title="memory of one node")
    axis.grid(alpha=0.3)
