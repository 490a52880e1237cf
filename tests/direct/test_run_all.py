"""benchmarks/run_all.py: it knows every benchmark, writes what they print, and says which of them failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run_all(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "run_all.py"), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)


def test_every_benchmark_is_in_it() -> None:
    listed = {line.split()[2] for line in run_all("--list").stdout.splitlines()}
    there = {f"benchmarks/{path.name}" for path in BENCHMARKS.glob("[a-z]*.py")} - {"benchmarks/run_all.py"}
    assert listed == there


def test_each_of_them_starts() -> None:
    """None of what they import has moved away."""
    names = sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    command = [sys.executable, "-c", code, *names]
    ended = subprocess.run(command, cwd=BENCHMARKS, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.table
def test_outputs_and_a_failure(tmp_path: Path) -> None:
    """The failure is a real one: the picture's place is taken by a folder."""
    (tmp_path / "barrier-2.svg").mkdir()
    ended = run_all(tmp_path, "--quick", "--only", "barrier-2", "grouping")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "barrier-2 failed" in ended.stdout
    assert "1 of 2 benchmarks" in ended.stdout
    assert "barrier.py --ranks 2" in (tmp_path / "barrier-2.txt").read_text().splitlines()[0]
    assert (tmp_path / "grouping.txt").stat().st_size > 200
    (tmp_path / "barrier-2.svg").rmdir()
    ended = run_all(tmp_path, "--quick", "--only", "barrier-2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "barrier-2.json").read_text())
    assert (tmp_path / "barrier-2.svg").stat().st_size > 1000


def test_an_unknown_name_is_an_error() -> None:
    ended = run_all("--only", "al_reduce")
    assert ended.returncode == 1
    assert "There are: all_reduce-2" in ended.stderr
