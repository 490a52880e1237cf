"""Installs torch into this Python's environment: the CPU build where there is no GPU.

    python scripts/install_torch.py 2.13.0 [INDEX_URL]

An index that is given is used as it is. Otherwise, without an NVIDIA GPU, PyTorch's own CPU index is tried first (PyPI's
torch may bring several GB of CUDA packages), then the index that pip is set up for. An installed torch of that version is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import metadata

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACH_SECONDS = 5


def installed() -> str:
    """The installed version without its local part (``2.13.0`` for ``2.13.0+cpu``), or ''."""
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def reachable(index: str) -> bool:
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=REACH_SECONDS) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def pip_is_told_an_index() -> bool:
    """An index in pip's settings was chosen by whoever set up the machine: it goes first."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    return "PIP_INDEX_URL" in os.environ or "index-url" in shown


def main(version: str, index: str = "") -> int:
    if installed() == version:
        print(f"torch {version} is installed already.")
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", f"torch=={version}"]
    if index:
        command += ["--extra-index-url", index]
    elif not has_gpu() and not pip_is_told_an_index() and reachable(CPU_INDEX):
        # Only the CPU index has the local version +cpu; torch's own requirements come from PyPI.
        command[-1] += "+cpu"
        command += ["--extra-index-url", CPU_INDEX]
    print(" ".join(["Installing", *command[5:]]), flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
