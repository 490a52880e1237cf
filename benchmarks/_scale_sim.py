"""scale.py's simulator part: `ftcomm-sim --scale` by ranks and latency, and what of it cannot be had here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from _jobs import Broken

BYTES_PER_PAIR = 90  # of whole nodes: what a rank holds grows with the ranks, so all of them with their square
BUILD = "cmake -S . -B build -DFTCOMM_TORCH=OFF -DFTCOMM_SIM_MAX_RANKS=10240 && cmake --build build --target ftcomm-sim"


def simulated(program: Path, sizes: list[int], links_us: list[int], patience: float) -> list[dict[str, Any]]:
    """A row for each run, as the simulator prints it. What is left out is said on standard output."""
    found = []
    for size in sizes:
        for link_us in links_us:
            command = [str(program), "--scale", str(size), "--link-us", str(link_us)]
            if size * size * BYTES_PER_PAIR > 0.7 * available_memory():
                command.append("--fence-only")
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience)
            except subprocess.TimeoutExpired:
                print(f"simulator: {size} ranks left out: not over after {patience:g} s (--sim-patience)")
                continue
            if done.returncode == 2:
                raise Broken(f"{program} has no --scale: it is older than this benchmark. Build ftcomm again.")
            if done.returncode != 0:
                raise Broken(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-2000:]}")
            found.append(json.loads(done.stdout))
    _say_what_is_missing(found)
    return found


def _say_what_is_missing(found: list[dict[str, Any]]) -> None:
    for size, most in sorted({(r["ranks"], r["most_ranks"]) for r in found if not r["whole_nodes"]}):
        if size > most:
            print(
                f"simulator: {size} ranks: the barrier's fence alone, as this build has at most {most} whole nodes. More:"
            )
            print(f"  {BUILD}\n  and --simulator build/native/sim/ftcomm-sim")
        else:
            gib = size * size * BYTES_PER_PAIR / 2**30
            print(f"simulator: {size} ranks: the barrier's fence alone, as whole nodes take about {gib:.0f} GiB")


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    names = ("messages", "a rank sends", "receives", "peers", "cell", "bytes", "rounds", "ms")
    lines = [f"{'ranks':>8}{'link us':>9}  {'operation':22}" + "".join(f"{name:>13}" for name in names)]
    for row in sorted(rows, key=lambda r: (r["link_us"], r["ranks"])):
        for name, o in row["operations"].items():
            values = (
                o["messages"],
                o["most_sent"],
                o["most_received"],
                o["most_peers"],
                o["cell_requests"],
                o["bytes"],
            )
            counts = "".join(f"{value:>13}" for value in (*values, o["rounds"]))
            lines.append(f"{row['ranks']:>8}{row['link_us']:>9g}  {name:22}{counts}{1e3 * o['seconds']:>13.3f}")
        if row["whole_nodes"]:
            lines.append(f"{row['ranks']:>8}{'':9}  bytes that a node takes: {row['bytes_per_rank']}")
    return "\n".join(lines)


def growing(rows: list[dict[str, Any]], link_us: float) -> dict[str, dict[int, float]]:
    """By quantity and by ranks."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["link_us"] != link_us:
            continue
        for name, o in row["operations"].items():
            for key in ("seconds", "rounds", "messages", "most_received", "most_peers"):
                found.setdefault(f"{name}: {WORDS[key]}", {})[row["ranks"]] = float(o[key])
        if row["whole_nodes"]:
            found.setdefault("bytes of a node", {})[row["ranks"]] = float(row["bytes_per_rank"])
    return found


WORDS = {
    "seconds": "time",
    "rounds": "rounds",
    "messages": "messages in all",
    "most_received": "messages to one rank",
    "most_peers": "peers of one rank",
}
