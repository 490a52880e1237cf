"""What the libraries show to others in the process: not a C++ library that some toolchains link in statically."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ftcomm import _lib


def shown(library: Path) -> set[str]:
    """Names that it defines for all."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    lines = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in lines.splitlines()}


def test_the_library_shows_its_c_functions_only() -> None:
    names = shown(Path(_lib.library_path()))
    assert "ft_collective" in names
    assert {name for name in names if not name.startswith("ft_")} == set()
