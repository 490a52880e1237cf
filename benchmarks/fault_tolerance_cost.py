"""What fault tolerance costs while nobody fails: all-reduce with it, and with it compiled out.

    python benchmarks/fault_tolerance_cost.py [--ranks 2,4] [--sizes 8:64M] [--rounds 30] [--json FILE] [--plot FILE]
    python benchmarks/fault_tolerance_cost.py --algorithm ring --sizes 1M,4M      by frames, at all sizes

Builds libftcomm.so twice into build/ (cmake, and a C++20 compiler): as it is, and with the fence at the end of a ring, the labels
of segments and what is kept for others compiled out (native/src/base/fault_tolerance.h), and starts one job with each
(FTCOMM_LIBRARY). In place, float32, policy raise. A round is a number of calls in one job and then in the other, in an order
drawn by lot; the ranks of the job whose turn it is not sleep in a read. Times are of the slowest rank. "with / without" is the
median over rounds of the ratio, with the 95 % confidence interval of that median; the mark is 1.02 from 1 MiB on and 1.10 below,
and is kept or missed where all of that interval is on one side of it. Values are compared in both jobs, with the buffer filled
anew as soon as a call returns.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from _jobs import Broken, all_tidied, one_thread, start, tail
from _plots import pyplot
from _two_builds import BUILDS, build_both
from suite.machine import described, heading
from suite.measure import MOST_CALLS, WARM, Cell
from suite.options import rank_list, size_list, size_text

PATIENCE = 60.0  # seconds for a round
COLOR = "#1b6ca8"


class Job:
    """Ranks that have loaded one of the libraries."""

    def __init__(self, name: str, library: Path, ranks: int, args: argparse.Namespace, within: Path) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=name, dir=within))
        socket = str(self.folder / "socket")
        plan: dict[str, Any] = {"ranks": ranks, "socket": socket, "store": str(self.folder / "store")}
        plan |= {"algorithm": args.algorithm, "transport": args.transport}
        environment = one_thread(self.folder) | {"COST": json.dumps(plan), "FTCOMM_LIBRARY": str(library)}
        command = [sys.executable, str(Path(__file__).with_name("_cost_ranks.py"))]
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        with Listener(socket, family="AF_UNIX", backlog=ranks) as listener:
            accepting = listener._listener._socket  # type: ignore[attr-defined] # to wait on it
            for rank in range(ranks):
                out = self.folder / f"out-{rank}"
                self.processes.append(start(command, environment | {"RANK": str(rank)}, out))
            while len(self.connections) < ranks:
                if not wait([accepting], 1.0):
                    self._look()
                    continue
                self.connections.append(listener.accept())
        self.version = self._answers()[0]

    def ask(self, what: str, elements: int, calls: int = 0) -> float:
        """The most that a rank answers."""
        for connection in self.connections:
            connection.send((what, elements, calls))
        return float(max(self._answers()))

    def end(self) -> None:
        for connection in self.connections:
            connection.send(("end", 0, 0))
        for process in self.processes:
            if process.wait(PATIENCE) != 0:
                self._look()

    def _answers(self) -> list[Any]:
        answers = []
        for connection in self.connections:
            try:
                if not connection.poll(PATIENCE):
                    raise Broken(f"a rank of the job {self.name} fault tolerance has hung for {PATIENCE:g} s")
                answers.append(connection.recv()[1])
            except (EOFError, ConnectionResetError):
                self._look(2.0)
                raise Broken(f"a rank of the job {self.name} fault tolerance has hung up") from None
        return answers

    def _look(self, patience: float = 0) -> None:
        """Broken with its output, if a rank has failed; what hangs up ends a little later."""
        for rank, process in enumerate(self.processes):
            code = None
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(patience)
            if code not in (None, 0):
                out = tail(self.folder / f"out-{rank}")
                raise Broken(f"rank {rank} of the job {self.name} fault tolerance ended with {code}\n{out}")


@contextmanager
def jobs(libraries: dict[str, Path], ranks: int, args: argparse.Namespace, within: Path) -> Iterator[dict[str, Job]]:
    both = {name: Job(name, library, ranks, args, within) for name, library in libraries.items()}
    yield both
    for job in both.values():
        job.end()


def measured(both: dict[str, Job], nbytes: int, args: argparse.Namespace, lot: random.Random) -> Cell:
    elements = max(1, nbytes // 4)
    for job in both.values():
        job.ask("check", elements)
    calls = how_many(both["with"], elements, args.budget)
    times: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(args.rounds + WARM):
        for name in lot.sample(sorted(both), len(both)):
            times[name].append(both[name].ask("measure", elements, calls))
    return Cell(elements * 4, {name: seconds[WARM:] for name, seconds in times.items()})


def how_many(job: Job, elements: int, budget: float) -> int:
    """Calls in a round, from how long a few take."""
    number = 1
    while True:
        seconds = job.ask("measure", elements, number)
        if seconds * number >= budget / 4 or number >= MOST_CALLS:
            return max(1, min(MOST_CALLS, round(budget / seconds)))
        number *= 4


def mark(nbytes: int) -> float:
    return 1.02 if nbytes >= 1 << 20 else 1.10


def verdict(cell: Cell) -> str:
    _, low, high = cell.ratio("with", "without")
    return "kept" if high <= mark(cell.nbytes) else "missed" if low > mark(cell.nbytes) else "undecided"


def row(ranks: int, cell: Cell) -> str:
    middle, low, high = cell.ratio("with", "without")
    ratio = f"{middle:.3f} [{low:.3f}, {high:.3f}]"
    micro = "".join(f"{1e6 * cell.median(name):14.2f}" for name in BUILDS)
    return f"{ranks:>5}{size_text(cell.nbytes):>10}{micro}{ratio:>24}{mark(cell.nbytes):>7.2f}  {verdict(cell)}"


def draw(cells: dict[int, list[Cell]], path: Path) -> None:
    """A panel for each number of ranks: the ratio by size, with its interval, and the mark."""
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(cells), figsize=(1 + 5 * len(cells), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (ranks, of_it) in zip(axes[0], cells.items(), strict=True):
        sizes = [cell.nbytes for cell in of_it]
        ratios = [cell.ratio("with", "without") for cell in of_it]
        axis.plot(sizes, [r[0] for r in ratios], "o-", ms=3, color=COLOR, label="with / without")
        axis.fill_between(sizes, [r[1] for r in ratios], [r[2] for r in ratios], color=COLOR, alpha=0.2, lw=0)
        axis.step(sizes, [mark(size) for size in sizes], where="post", color="#d1495b", lw=1, label="the mark")
        axis.axhline(1, color="k", lw=0.8)
        axis.set(xscale="log", xlabel="bytes", title=f"all-reduce, {ranks} ranks")
        axis.set_xticks(sizes[::2], [size_text(s).replace("iB", "") for s in sizes[::2]], rotation=45, fontsize=7)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("time with fault tolerance over time without")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=size_list, default=size_list("8:64M"), help="bytes: 8:64M[:2] or 8,4K (default 8:64M)"
    )
    parser.add_argument("--ranks", type=rank_list, default=[2, 4], help="default 2,4")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--budget", type=float, default=0.03, help="seconds that a round of a job should take (default 0.03)"
    )
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--transport", choices=["auto", "shm", "tcp"], default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    parser.add_argument("--plot", type=Path, help="draw the ratios there (png, svg)")
    return parser.parse_args()


def measure(args: argparse.Namespace, libraries: dict[str, Path]) -> dict[int, list[Cell]]:
    machine = described(args, args.ranks)
    print(
        f"{heading(machine)}\n{'ranks':>5}{'size':>10}{'with us':>14}{'without us':>14}{'with / without':>24}{'mark':>7}",
        flush=True,
    )
    cells: dict[int, list[Cell]] = {ranks: [] for ranks in args.ranks}
    lot = random.Random(args.seed)
    with all_tidied() as folder:
        for ranks in args.ranks:
            with jobs(libraries, ranks, args, folder) as both:
                if both["with"].version == both["without"].version:
                    raise Broken("both libraries have fault tolerance: FTCOMM_LIBRARY was not obeyed")
                for nbytes in args.sizes:
                    cells[ranks].append(measured(both, nbytes, args, lot))
                    print(row(ranks, cells[ranks][-1]), flush=True)
                    if args.json:
                        rows = [
                            {"ranks": n, "bytes": c.nbytes, "seconds": c.times} for n, of in cells.items() for c in of
                        ]
                        args.json.write_text(json.dumps({"machine": machine, "cells": rows}))
    return cells


def main() -> None:
    args = arguments()
    try:
        cells = measure(args, build_both())
    except Broken as error:
        sys.exit(str(error))
    if args.plot:
        draw(cells, args.plot)


if __name__ == "__main__":
    main()
