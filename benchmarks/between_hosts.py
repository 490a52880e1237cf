"""All-reduce between two hosts, beside iperf3, gloo and Open MPI's tcp on the same line.

    python benchmarks/between_hosts.py                              1 rank a host; 9 lines
    python benchmarks/between_hosts.py --ranks-per-host 2           shared memory inside, tcp between
    python benchmarks/between_hosts.py --rate 5G --delay 0,1ms --sizes 1M,16M --json figures.json --plot picture.svg

The hosts are network namespaces of this machine: it needs root, or a kernel that lets users make user namespaces. A line between
them is a veth pair, narrowed by tbf to --rate bits a second, and made longer by --delay in each direction: by netem where the
kernel has it, else by a relay of the benchmark's own, of TUN devices (--delay-by). What a relay can carry is what iperf3 measures
there. Every line has a job of its own in which ftcomm's direct API, Open MPI (ob1 and btl tcp) and gloo take turns.

Two hosts that reduce S bytes must send each other S bytes, so an all-reduce that takes t seconds has a bandwidth of 8 S / t
bits a second in each direction ("Gbit/s"); with one rank a host this is nccl-tests' bus bandwidth, 2(n-1)/n S / t. "of iperf3":
that over the mean of the two directions of `iperf3 --bidir`, in the better of two runs, before and after the size; median
over rounds, with its 95 % confidence interval. The mark is 0.9, of sizes whose time is not mostly the line's delay.
"processors": user and system seconds of all ranks over the time that passed; iperf3's are its client's and server's. "sent /
bytes": what leaves a host, with headers, counted at its device, over S: 1 is the least, and a flat ring with two ranks a host
sends 1.5.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from _hosts_network import DEVICE, Impossible, Line, line, own_namespace, why_not
from _hosts_output import Result, draw, table, write_csv, write_json
from _hosts_shape import Shape, delay, rate, several
from _jobs import MPIRUN_FAILED, Broken, all_tidied, kill_all, mpirun, one_thread, run_job, start, tail
from suite.machine import heading
from suite.options import FIGURES, parser

RANKS = Path(__file__).with_name("_hosts_ranks.py")
PATIENCE = 1800.0  # seconds for one line
TRIPS = 20  # one way, that a round takes at least: ranks leave the barrier before it by up to one of them apart


def main() -> int:
    args = arguments()
    own_namespace(sys.argv)
    reason = why_not()
    if reason is not None:
        print(f"between_hosts.py is left out: {reason}")
        return 0
    if "mpi" in args.peers and open_mpi() is None:
        print("# without Open MPI's column: pip install 'ftcomm[mpi]'")
    if shutil.which("iperf3") is None:
        print("# without iperf3's bandwidth: install iperf3")
    results: list[Result] = []
    with all_tidied() as folder:
        environment = one_thread(folder) | {"FTCOMM_SECRET": secrets.token_hex(16)}
        for shape in (Shape(rate, delay) for rate in args.rate for delay in args.delay):
            try:
                with line(shape, args.delay_by) as joined:
                    results.append(measured(joined, args, folder, environment))
            except Impossible as error:
                print(f"\n# {shape} is left out: {error}", flush=True)
                continue
            except Broken as error:
                print(f"{shape}: {error}", file=sys.stderr)
                return 1
            if len(results) == 1:
                print(about(results[0]))
            print(f"\n{table(results[-1])}", flush=True)
    if results:
        for path, write in ((args.json, write_json), (args.csv, write_csv), (args.plot, draw)):
            if path:
                write(path, results)
    return 0


def arguments() -> argparse.Namespace:
    p = parser(__doc__, "8,64K,1M,16M,64M", FIGURES, ("ftcomm", "mpi", "gloo"))
    p.add_argument("--rate", type=several(rate), default=[0.0, 5e9, 1e9], help="of the line (default none,5G,1G)")
    p.add_argument("--delay", type=several(delay), default=[0.0, 0.001, 0.02], help="each way (default 0,1ms,20ms)")
    p.add_argument(
        "--delay-by", choices=["auto", "netem", "relay"], default="auto", help="(default auto: netem if it is there)"
    )
    p.add_argument("--ranks-per-host", type=int, default=1, help="(default 1)")
    p.add_argument("--iperf-seconds", type=int, default=2, help="each time that iperf3 runs (default 2)")
    return p.parse_args()


def open_mpi() -> str | None:
    """Its launcher, if mpi4py is there, too."""
    return mpirun() if importlib.util.find_spec("mpi4py") else None


def measured(joined: Line, args: argparse.Namespace, folder: Path, environment: dict[str, str]) -> Result:
    """All sizes on that line."""
    given, found = folder / "arguments.json", folder / "found.json"
    found.unlink(missing_ok=True)
    files = ("json", "csv", "plot")
    settings = {name: value for name, value in vars(args).items() if name not in files} | {"transport": "auto"}
    settings["budget"] = max(args.budget, TRIPS * joined.shape.delay)
    given.write_text(json.dumps(settings))
    program = [sys.executable, str(RANKS), str(given), str(found)]
    launcher = open_mpi() if "mpi" in args.peers else None
    if launcher:
        _start_mpi(_under_mpirun(launcher, joined, args, folder, program), environment)
    else:
        _without_launcher(joined, args, folder, environment, program)
    return Result(joined.shape.rate, joined.shape.delay, str(joined), json.loads(found.read_text()))


def _start_mpi(command: list[str], environment: dict[str, str]) -> None:
    for attempt in range(5):
        try:
            run_job(command, environment, PATIENCE, "mpirun")
        except Broken as error:
            if attempt == 4 or MPIRUN_FAILED not in str(error):
                raise
        else:
            return


def _under_mpirun(launcher: str, joined: Line, args: argparse.Namespace, folder: Path, program: list[str]) -> list[str]:
    """mpirun on the first host. What it takes for ssh goes over to the second one's namespace."""
    first, second = joined.hosts
    agent = folder / "agent"
    agent.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(second.command("sh", "-c"))} "$*"\n')
    agent.chmod(0o700)
    per_host = args.ranks_per_host
    command = [launcher, "--allow-run-as-root", "-n", str(2 * per_host), "--map-by", "slot"]
    command += ["--host", ",".join(f"{host.address}:{per_host}" for host in joined.hosts)]
    # Each host believes that all processors are its own, and would bind its first rank to the same one.
    command += ["--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", DEVICE]
    command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", DEVICE]
    if 2 * per_host >= len(os.sched_getaffinity(0)):  # the line's work needs some, too
        command += ["--mca", "mpi_yield_when_idle", "1"]
    return first.command(*command, *program)


def _without_launcher(
    joined: Line, args: argparse.Namespace, folder: Path, environment: dict[str, str], program: list[str]
) -> None:
    size = 2 * args.ranks_per_host
    common = environment | {"WORLD_SIZE": str(size), "MASTER_ADDR": joined.hosts[0].address, "MASTER_PORT": "29500"}
    outs = [folder / f"out-{rank}" for rank in range(size)]
    try:
        processes = [
            start(joined.hosts[rank // args.ranks_per_host].command(*program), common | {"RANK": str(rank)}, outs[rank])
            for rank in range(size)
        ]
        for rank, process in enumerate(processes):
            if process.wait(PATIENCE) != 0:
                raise Broken("\n".join(f"rank {rank}:\n{tail(out)}" for rank, out in enumerate(outs)))
    except subprocess.TimeoutExpired:
        raise Broken(f"not over after {PATIENCE:.0f} s\n{tail(outs[0])}") from None
    finally:
        kill_all(folder)


def about(result: Result) -> str:
    rows = [heading(result.found["machine"])]
    rows += ["# " + ", ".join(f"{name}={value}" for name, value in result.found["tcp"].items())]
    ranks = result.found["machine"]["ranks"]
    rows += [
        f"# {ranks // 2} a host; all on the processors of this machine, with the kernel's and the relay's work for the line"
    ]
    if ranks >= result.found["machine"]["processors"]:
        rows += ["# Open MPI's ranks hand on their processor while they wait (mpi_yield_when_idle)"]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
