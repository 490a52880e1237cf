"""Tables, files and pictures of between_hosts.py."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _plots import pyplot
from suite.measure import Cell, with_interval
from suite.output import COLORS, CSV_COLUMNS, NAMES, OURS, csv_rows

KIND = "all_reduce"
MARK = 0.9  # of iperf3's bandwidth


@dataclass
class Result:
    """One line: what _hosts_ranks.py has written, and how the line was made."""

    rate: float
    delay: float
    line: str
    found: dict[str, Any]

    @property
    def cells(self) -> list[Cell]:
        return [Cell.of(row) for row in self.found["cells"]]

    def iperf(self, at: int) -> float | None:
        """Bits a second: the better one of the runs before and after a size, as what disturbs one makes shares look good."""
        runs = self.found["iperf"][at : at + 2]
        return max((run["bits_per_second"] for run in runs), default=None)

    def share(self, at: int, peer: str) -> tuple[float, float, float] | None:
        """Of iperf3's bandwidth: median over rounds, and its 95 % confidence interval. None: no iperf3."""
        cell, rate = self.cells[at], self.iperf(at)
        return None if rate is None else with_interval([bandwidth(cell.nbytes, s) / rate for s in cell.times[peer]])

    def processors(self, at: int, peer: str) -> float:
        """Busy on average for the ranks of both hosts, over all rounds."""
        cell = self.cells[at]
        return sum(cell.cpu[peer]) / sum(cell.times[peer])


def bandwidth(nbytes: int, seconds: float) -> float:
    """Bits a second in each direction of the line: two hosts that reduce S bytes send each other S bytes at least."""
    return 8 * nbytes / seconds


def table(result: Result) -> str:
    """A row for each size and system."""
    found = result.found
    rows = [f"# {result.line}; round trip {1e3 * found['round_trip']:.2f} ms", *_iperf(found["iperf"])]
    rows.append(
        f"{'bytes':>9}  {'':14}{'us':>11}{'Gbit/s':>9}{'of iperf3':>20}{'/ ftcomm':>24}{'processors':>12}{'sent / bytes':>14}"
    )
    for at, cell in enumerate(result.cells):
        peers = [name for name in NAMES if name in cell.times]
        first = next((name for name in OURS if name in peers), "")
        for peer in peers:
            seconds = cell.median(peer)
            ratio = cell.ratio(peer, first) if first and peer not in OURS else None
            rows.append(
                f"{cell.nbytes if peer == peers[0] else '':>9}  {NAMES[peer]:14}{1e6 * seconds:11.1f}"
                f"{bandwidth(cell.nbytes, seconds) / 1e9:9.3f}{_interval(result.share(at, peer)):>20}{_interval(ratio):>24}"
                f"{result.processors(at, peer):12.2f}{found['cells'][at]['wire'][peer] / cell.nbytes:14.2f}"
            )
    reasons = {name: reason for cell in result.cells for name, reason in cell.refused.items()}
    return "\n".join([*rows, *(f"# {NAMES[name]} can't: {reason}" for name, reason in reasons.items())])


def _iperf(runs: Sequence[dict[str, float]]) -> list[str]:
    if not runs:
        return []
    rates = sorted(run["bits_per_second"] / 1e9 for run in runs)
    used = sum(run["processors"] for run in runs) / len(runs)
    lost = sum(run["retransmits"] for run in runs)
    return [
        f"# iperf3 --bidir: {rates[len(rates) // 2]:.3f} Gbit/s each way ({rates[0]:.3f} to {rates[-1]:.3f} in {len(runs)} "
        f"runs), {used:.2f} processors, {lost:.0f} segments sent again"
    ]


def _interval(found: tuple[float, float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]"


def write_json(path: Path, results: Sequence[Result]) -> None:
    lines = [{"rate": r.rate, "delay": r.delay, "line": r.line} | r.found for r in results]
    path.write_text(json.dumps({"operation": KIND, "lines": lines}, indent=1))


def write_csv(path: Path, results: Sequence[Result]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        machine = results[0].found["machine"]
        file.write("".join(f"# {name}: {value}\n" for name, value in machine.items()))
        writer = csv.writer(file)
        writer.writerow(["bits_per_second", "delay_s", *CSV_COLUMNS, "iperf3_bits_per_second"])
        for r in results:
            places = {cell.nbytes: at for at, cell in enumerate(r.cells)}
            for row in csv_rows(KIND, machine["ranks"], r.cells):
                writer.writerow([r.rate, r.delay, *row, r.iperf(places[row[2]])])


def draw(path: Path, results: Sequence[Result]) -> None:
    """A panel for each line: the share of iperf3's bandwidth by size; without iperf3 the bandwidth itself."""
    plt = pyplot()
    rates, delays = (list(dict.fromkeys(getattr(r, name) for r in results)) for name in ("rate", "delay"))
    shape = (len(rates), len(delays))
    figure, axes = plt.subplots(*shape, figsize=(4.2 * shape[1], 3 * shape[0]), squeeze=False, sharex=True)
    for panel in axes.flat:
        panel.set_visible(False)
    for result in results:
        panel = axes[rates.index(result.rate)][delays.index(result.delay)]
        panel.set_visible(True)
        _panel(panel, result)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _panel(panel: Any, result: Result) -> None:
    for peer in NAMES:
        at = [n for n, c in enumerate(result.cells) if peer in c.times]
        sizes = [result.cells[n].nbytes for n in at]
        shares = [share for n in at if (share := result.share(n, peer)) is not None]
        if shares:
            panel.plot(sizes, [s[0] for s in shares], "o-", ms=3, color=COLORS[peer], label=NAMES[peer])
            panel.fill_between(
                sizes, [s[1] for s in shares], [s[2] for s in shares], color=COLORS[peer], alpha=0.2, lw=0
            )
        elif at:
            rates = [bandwidth(s, result.cells[n].median(peer)) / 1e9 for n, s in zip(at, sizes, strict=True)]
            panel.plot(sizes, rates, "o-", ms=3, color=COLORS[peer], label=NAMES[peer])
    if result.found["iperf"]:
        panel.axhline(MARK, color="k", lw=0.8, ls=":")
    panel.set(xscale="log", ylim=(0, None), xlabel="bytes")
    panel.set_ylabel("of iperf3's bandwidth" if result.found["iperf"] else "Gbit/s each way")
    panel.set_title(result.line, fontsize=8)
    panel.grid(alpha=0.3)
