"""The collectives of a folder in one document: Open MPI's and gloo's times over ftcomm's, by operation and ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from suite.machine import heading
from suite.measure import Cell
from suite.operations import BUS
from suite.options import size_text
from suite.output import NAMES

DIRECT = "ftcomm"  # the direct API
PEERS = ("mpi", "gloo")
Results = dict[str, dict[int, Cell]]  # by operation and the bytes that were asked for


def write(folder: Path) -> Path | None:
    """Writes ``collectives.md`` there, of what `all_reduce-2.json` and its like hold. None: there are none."""
    found: dict[int, Results] = {}
    machine: dict[str, Any] = {}
    for kind in BUS:
        for path in sorted(folder.glob(f"{kind}-*.json")):
            given = json.loads(path.read_text(encoding="utf-8"))
            machine = given["machine"]
            cells = [Cell.of(row) for row in given["cells"]]
            found.setdefault(machine["ranks"], {})[kind] = {c.asked: c for c in cells if DIRECT in c.times}
    if not found:
        return None
    path = folder / "collectives.md"
    path.write_text("\n".join(_document(found, machine)) + "\n", encoding="utf-8")
    return path


def _document(found: dict[int, Results], machine: dict[str, Any]) -> Iterator[str]:
    yield "# Collectives"
    yield ""
    yield "A peer's time over ftcomm's direct API (above 1: ftcomm is faster), in brackets ftcomm's microseconds. Bold: the peer"
    yield "is faster, by the whole 95 % confidence interval of the ratio."
    yield ""
    yield from (f"    {line}" for line in heading({**machine, "ranks": sorted(found)}).splitlines())
    for ranks in sorted(found):
        for peer in PEERS:
            yield from _table(found[ranks], ranks, peer)


def _table(results: Results, ranks: int, peer: str) -> Iterator[str]:
    kinds = [kind for kind in results if any(peer in cell.times for cell in results[kind].values())]
    if not kinds:
        return
    sizes = sorted({nbytes for kind in kinds for nbytes in results[kind]})
    yield ""
    yield f"## {NAMES[peer]}, {ranks} ranks"
    yield ""
    yield _row(["bytes", *(kind.replace("_", "-") for kind in kinds)])
    yield _row(["---"] * (1 + len(kinds)))
    for nbytes in sizes:
        yield _row([size_text(nbytes) if nbytes else "", *(_text(results[kind].get(nbytes), peer) for kind in kinds)])


def _row(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _text(cell: Cell | None, peer: str) -> str:
    if cell is None or peer not in cell.times:
        return ""
    middle, _, high = cell.ratio(peer, DIRECT)
    ratio = f"**{middle:.2f}**" if high < 1 else f"{middle:.2f}"
    micro = 1e6 * cell.median(DIRECT)
    return f"{ratio} ({micro:.{1 if micro < 10 else 0}f})"
