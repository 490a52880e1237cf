"""One benchmark of one operation, from its command line to its outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from _jobs import FTRUN, mpirun, under_ulfm

from suite.limit import bytes_per_second
from suite.machine import described, heading
from suite.measure import measured
from suite.operations import MEMORY
from suite.options import parse
from suite.output import Table, draw, write_csv, write_json
from suite.peers import all_peers, under_mpi


def main(kind: str, doc: str | None, sizes: str = "8:64M") -> None:
    args = parse(doc, sizes)
    if not (under_mpi() or "RANK" in os.environ):
        sys.exit(_under_launcher(args))
    with all_peers(args) as (comm, peers):
        machine = described(args, comm.size)
        memory = 0.0 if args.no_limit or kind not in MEMORY else bytes_per_second(comm)
        first = comm.rank == 0
        table = Table(kind, comm.size, list(peers), memory)
        if first:
            print(heading(machine))
            if memory:
                times = MEMORY[kind](comm.size)
                print(
                    f"# copies reach {memory / 1e9:.1f} GB/s, read and written; the limit is {times} x bytes at that rate"
                )
            print(f"# {kind}\n{table.header()}", flush=True)
        cells = []
        refused: dict[str, str] = {}
        for cell in measured(kind, comm, peers, args):
            cells.append(cell)
            refused |= cell.refused
            if first:
                print(table.row(cell), flush=True)
        if first:
            for name, reason in refused.items():
                print(f"# {name} can't: {reason}")
            _write(args, kind, machine, memory, cells)


def _write(args: Any, kind: str, machine: dict[str, Any], memory: float, cells: list[Any]) -> None:
    if args.json:
        write_json(args.json, kind, machine, memory, cells)
    if args.csv:
        write_csv(args.csv, kind, machine, cells)
    if args.plot:
        draw(args.plot, kind, machine, memory, cells)


def _under_launcher(args: Any) -> int:
    """The same command again: under mpirun where Open MPI's column is wanted and can be had, else under ftrun."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    wanted = "mpi" in args.peers
    if wanted and mpirun():
        launcher = [*under_ulfm(args.ranks), sys.executable]
    else:
        launcher = [*FTRUN, "--nproc-per-node", str(args.ranks)]
        if wanted:
            print("no mpirun of Open MPI 5: without its column (pip install 'ftcomm[mpi]')", file=sys.stderr)
    return subprocess.run([*launcher, *sys.argv], env=environment, check=False).returncode
