"""libftcomm.so of this source tree twice, for fault_tolerance_cost.py: as it is, and with fault tolerance compiled out.

Both with the same compiler and flags; what is there already is only brought up to date.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _jobs import Broken, tool

ROOT = Path(__file__).resolve().parents[1]
BUILDS = {"with": "OFF", "without": "ON"}


def build_both() -> dict[str, Path]:
    """The libraries; Broken says what is missing."""
    cmake, ninja = tool("cmake"), tool("ninja")
    if cmake is None:
        raise Broken("no cmake: pip install cmake ninja; the libraries that are compared are built with it")
    found = {}
    for name, option in BUILDS.items():
        folder = ROOT / "build" / f"{name}-fault-tolerance"
        configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_UNITY_BUILD=ON"]
        configure += ["-DFTCOMM_TORCH=OFF", f"-DFTCOMM_WITHOUT_FAULT_TOLERANCE={option}"]
        if not (folder / "CMakeCache.txt").exists() and ninja is not None:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        print(f"# building {folder} ...", file=sys.stderr, flush=True)
        _run(configure, "configured; it needs a C++20 compiler (apt install g++)")
        _run([cmake, "--build", str(folder), "--target", "ftcomm", "--parallel"], "built")
        found[name] = folder / "native" / "libftcomm.so"
    return found


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise Broken(f"the library could not be {what}:\n$ {' '.join(command)}\n{done.stdout[-3000:]}")
