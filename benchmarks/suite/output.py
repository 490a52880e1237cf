"""Tables, files and pictures of cells."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from suite.measure import Cell
from suite.operations import BUS, MEMORY
from suite.options import size_text

OURS = ("ftcomm", "torch")
NAMES = {"ftcomm": "ftcomm", "torch": "ftcomm, torch", "mpi": "Open MPI", "gloo": "gloo"}
COLORS = {"ftcomm": "#1b6ca8", "torch": "#6fa8dc", "mpi": "#d1495b", "gloo": "#8d99ae"}


class Table:
    """Rows as they come: time of each peer, ftcomm's bandwidth, how many times faster than each peer it is."""

    def __init__(self, kind: str, ranks: int, peers: Sequence[str], memory: float) -> None:
        self._kind, self._ranks, self._peers, self._memory = kind, ranks, list(peers), memory
        self._first = next((name for name in OURS if name in peers), self._peers[0])
        self._others = [name for name in ("mpi", "gloo") if name in peers and name != self._first]

    def header(self) -> str:
        columns = [f"{'bytes':>10}", *(f"{NAMES[p] + ' us':>18}" for p in self._peers)]
        columns += [f"{'algbw GB/s':>11}", f"{'busbw GB/s':>11}"]
        columns += [f"{NAMES[p] + ' / ' + NAMES[self._first]:>26}" for p in self._others]
        if self._memory:
            columns.append(f"{'of the limit':>13}")
        return "".join(columns)

    def row(self, cell: Cell) -> str:
        columns = [f"{cell.nbytes:>10}"]
        for peer in self._peers:
            columns.append(f"{1e6 * cell.median(peer):18.2f}" if peer in cell.times else f"{'-':>18}")
        if self._first not in cell.times:
            return "".join(columns)
        seconds = cell.median(self._first)
        rate = cell.nbytes / seconds / 1e9
        columns += [f"{rate:11.2f}", f"{rate * BUS[self._kind](self._ranks):11.2f}"]
        for peer in self._others:
            if peer not in cell.times:
                columns.append(f"{'-':>26}")
                continue
            middle, low, high = cell.ratio(peer, self._first)
            columns.append(f"{f'{middle:.2f} [{low:.2f}, {high:.2f}]':>26}")
        if self._memory:
            columns.append(f"{seconds / limit(self._kind, self._ranks, cell.nbytes, self._memory):13.2f}")
        return "".join(columns)


def limit(kind: str, ranks: int, nbytes: int, memory: float) -> float:
    """Seconds that the bytes take through memory at best, at ``memory`` bytes a second."""
    return MEMORY[kind](ranks) * nbytes / memory


def write_json(path: Path, kind: str, machine: dict[str, Any], memory: float, cells: Sequence[Cell]) -> None:
    rows = json_rows(cells)
    path.write_text(json.dumps({"operation": kind, "machine": machine, "memory": memory, "cells": rows}, indent=1))


def json_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "bytes": c.nbytes,
            "asked": c.asked,
            "seconds": c.times,
            "processor_seconds": c.cpu,
            "refused": c.refused,
        }
        for c in cells
    ]


def write_csv(path: Path, kind: str, machine: dict[str, Any], cells: Sequence[Cell]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write("".join(f"# {name}: {value}\n" for name, value in machine.items()))
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        writer.writerows(csv_rows(kind, machine["ranks"], cells))


CSV_COLUMNS = [
    "operation",
    "ranks",
    "bytes",
    "peer",
    "median_us",
    "min_us",
    "max_us",
    "algbw_gbs",
    "busbw_gbs",
    "rounds",
]


def csv_rows(kind: str, ranks: int, cells: Sequence[Cell]) -> Iterator[list[Any]]:
    for cell in cells:
        for peer, times in cell.times.items():
            seconds = cell.median(peer)
            rate = cell.nbytes / seconds / 1e9
            micro = (f"{1e6 * s:.3f}" for s in (seconds, min(times), max(times)))
            bandwidths = (f"{rate:.4f}", f"{rate * BUS[kind](ranks):.4f}")
            yield [kind, ranks, cell.nbytes, peer, *micro, *bandwidths, len(times)]


def draw(path: Path, kind: str, machine: dict[str, Any], memory: float, cells: Sequence[Cell]) -> None:
    """Time over size on the left; on the right how many times as long the peers take."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    sizes = [max(1, c.nbytes) for c in cells]
    for peer in NAMES:
        have = [(s, c) for s, c in zip(sizes, cells, strict=True) if peer in c.times]
        if not have:
            continue
        x = [s for s, _ in have]
        left.loglog(x, [1e6 * c.median(peer) for _, c in have], "o-", ms=3, color=COLORS[peer], label=NAMES[peer])
        ours = next((name for name in OURS if name in cells[0].times), peer)
        if peer in OURS or ours not in cells[0].times:
            continue
        ratios = [c.ratio(peer, ours) for _, c in have]
        right.plot(x, [r[0] for r in ratios], "o-", ms=3, color=COLORS[peer], label=f"{NAMES[peer]} / {NAMES[ours]}")
        right.fill_between(x, [r[1] for r in ratios], [r[2] for r in ratios], color=COLORS[peer], alpha=0.2, lw=0)
    if memory:
        left.loglog(
            sizes, [1e6 * limit(kind, machine["ranks"], s, memory) for s in sizes], "k:", lw=1, label="memory's limit"
        )
    right.axhline(1, color="k", lw=0.8)
    right.set(xscale="log", yscale="log", xlabel="bytes", ylabel="times as long")
    left.set(xlabel="bytes", ylabel="microseconds per call", title=f"{kind}, {machine['ranks']} ranks")
    right.set_title(f"{machine['processors']} processors")
    for axes in (left, right):
        axes.set_xticks(sizes[::2], [size_text(s).replace("iB", "") for s in sizes[::2]], rotation=45, fontsize=7)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
