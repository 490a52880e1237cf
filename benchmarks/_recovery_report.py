"""The table and the picture of recovery.py."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

from _plots import pyplot
from suite.machine import heading
from suite.measure import with_interval
from suite.options import size_text

NAMES = {"raise": "ftcomm, raise", "lossy": "ftcomm, lossy", "ulfm": "Open MPI, ULFM"}
COLORS = {"raise": "#1b6ca8", "lossy": "#6fa8dc", "ulfm": "#d1495b"}
# Of the last survivor, but for the first two.
TIMES = {
    "healthy": "healthy",  # an all-reduce of all ranks before the failure: what the payload itself takes
    "ended": "ended",  # the kernel has freed the process's memory and closed its sockets
    "evidence": "evidence",
    "noticed": "noticed",
    "done": "next all-reduce",
}
Row = dict[str, Any]
Cell = tuple[int, int]


def cells(found: Row) -> dict[Cell, dict[str, list[Row]]]:
    """By ranks and bytes, then by system: its rows, one a round."""
    grouped: dict[Cell, dict[str, list[Row]]] = {}
    for row in found["rows"]:
        grouped.setdefault((row["ranks"], row["bytes"]), {}).setdefault(row["system"], []).append(row)
    return {cell: {s: grouped[cell][s] for s in NAMES if s in grouped[cell]} for cell in sorted(grouped)}


def values(rows: list[Row], time: str) -> list[float]:
    """Milliseconds, smallest first; infinite where a stopped rank was not noticed in time."""
    late = time not in ("healthy", "ended")
    kept = [row["times"] for row in rows if "failed" not in row]
    found = [math.inf if times is None and late else (times or {}).get(time) for times in kept]
    return sorted(value for value in found if value is not None)


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratio(theirs: list[Row], ours: list[Row]) -> tuple[float, float, float] | None:
    """ULFM's time over ours in the same round: median and its 95 % confidence interval; rounds that both came through."""
    both = zip(theirs, ours, strict=False)  # the last round may have been cut off
    found = [a["times"]["done"] / b["times"]["done"] for a, b in both if a["times"] and b["times"]]
    return with_interval(found) if found else None


def told(value: float | None) -> str:
    if value is None:
        return "-"
    return "not noticed" if math.isinf(value) else f"{value:.2f}"


def line_of(cell: Cell, system: str, by_system: dict[str, list[Row]]) -> list[str]:
    rows = by_system[system]
    columns = [str(cell[0]), size_text(cell[1]), NAMES[system]]
    for time in ("healthy", "ended", "evidence", "noticed"):
        known = values(rows, time)
        columns.append(told(percentile(known, 0.5) if known else None))
    done = values(rows, "done")
    columns += [told(percentile(done, share) if done else None) for share in (0.5, 0.9, 0.99, 1)]
    against = ratio(by_system["ulfm"], rows) if system != "ulfm" and "ulfm" in by_system else None
    columns.append(f"{against[0]:.2f} [{against[1]:.2f}, {against[2]:.2f}]" if against else "")
    failed = sum("failed" in row for row in rows)
    columns.append(f"{len(rows)}, {failed} did not recover" if failed else str(len(rows)))
    return columns


def report(found: Row) -> None:
    if not found["rows"]:
        return
    settings = found["machine"]["settings"]
    print(heading(found["machine"]))
    print(
        f"# milliseconds from {'SIGSTOP' if settings['stop'] else 'SIGKILL'} to the last survivor; medians, and for the next "
        "all-reduce percentiles, too\n# (of fewer than 100 kills the 99th is the largest). ULFM / this: its time over this one's "
        "in the same round, median\n# [95 % confidence interval]; above 1 ftcomm is faster"
    )
    names = ["ranks", "size", "system", *list(TIMES.values())[:-1]]
    names += ["next p50", "p90", "p99", "max", "ULFM / this", "kills"]
    grouped = cells(found)
    lines = [line_of(cell, system, systems) for cell, systems in grouped.items() for system in systems]
    widths = [max(len(line[i]) for line in (names, *lines)) for i in range(len(names))]
    for line in (names, *lines):
        print(
            "  ".join(
                f"{text:<{w}}" if i == 2 else f"{text:>{w}}"
                for i, (text, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
        )
    for system in ("raise", "lossy"):
        kinds: Counter[str] = Counter()
        for row in found["rows"]:
            if row["system"] == system and row["times"]:
                kinds.update(row["times"]["kinds"])
        if kinds:
            print(
                f"# {NAMES[system]}: evidence by {', '.join(f'{name} {count}' for name, count in kinds.most_common())}"
            )
    for row in found["rows"]:
        if "failed" in row:
            where = f"round {row['round']}, {row['ranks']} ranks, {size_text(row['bytes'])}"
            print(f"# {where}: {row['failed'].splitlines()[0]}")


def draw(found: Row, path: Path) -> None:
    """A panel for each number of ranks: the next all-reduce by size, medians with a whisker to the 99th percentile."""
    plt = pyplot()
    grouped = cells(found)
    by_ranks = {n: list(group) for n, group in itertools.groupby(grouped, key=lambda cell: cell[0])}
    figure, axes = plt.subplots(
        1, len(by_ranks), figsize=(1.5 + 4 * len(by_ranks), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (ranks, of_it) in zip(axes[0], by_ranks.items(), strict=True):
        for shift, system in enumerate(NAMES):
            points = []
            for at, cell in enumerate(of_it):
                done = [v for v in values(grouped[cell].get(system, []), "done") if math.isfinite(v)]
                if done:
                    points.append((at + 0.08 * (shift - 1), percentile(done, 0.5), percentile(done, 0.99)))
            if points:
                x, middle, high = zip(*points, strict=True)
                whiskers = [[0.0] * len(x), [h - m for h, m in zip(high, middle, strict=True)]]
                axis.errorbar(x, middle, whiskers, fmt="o-", ms=4, capsize=3, color=COLORS[system], label=NAMES[system])
        axis.set_xticks(range(len(of_it)), [size_text(size) for _, size in of_it])
        axis.set(yscale="log", xlabel="all-reduce of", title=f"{ranks} ranks")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms from the kill to the next all-reduce: p50, p99")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
