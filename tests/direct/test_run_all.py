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
    assert "## Open MPI, 2 ranks\n\n| bytes | barrier |" in (tmp_path / "collectives.md").read_text()


def test_the_document_says_who_is_faster(tmp_path: Path) -> None:
    """Bold: by the whole interval. Sizes are those that were asked for: 8 bytes in parts for three ranks are 12."""

    def cell(asked: int, there: int, ours: list[float], peer: list[float]) -> dict[str, object]:
        seconds = {"ftcomm": [1e-6 * t for t in ours], "mpi": [1e-6 * t for t in peer]}
        return {"bytes": there, "asked": asked, "seconds": seconds, "processor_seconds": {}, "refused": {}}

    def write(kind: str, ranks: int, *cells: dict[str, object]) -> None:
        machine = {"ranks": ranks, "processors": 2, "processor": "some", "gpu": "", "memory_gib": 8, "kernel": "6.1"}
        machine |= {"load_before": 0.5, "versions": {"ftcomm": "0.1.0"}, "settings": {"rounds": 15}}
        given = {"operation": kind, "machine": machine, "cells": cells}
        (tmp_path / f"{kind}-{ranks}.json").write_text(json.dumps(given))

    earlier = cell(4096, 4096, [30, 40], [20, 30])
    del earlier["asked"]  # of a folder that has been there for long
    write("all_reduce", 3, cell(8, 8, [1, 2], [2, 6]), earlier)
    write("all_gather", 3, cell(8, 12, [2, 2, 2], [1, 1.8, 4]))
    write("barrier", 2, cell(0, 0, [4, 4], [1, 1]))
    code = "import sys, pathlib\nfrom suite import summary\nprint(summary.write(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=BENCHMARKS, check=True, timeout=60, capture_output=True)
    lines = (tmp_path / "collectives.md").read_text().splitlines()
    two, three = lines.index("## Open MPI, 2 ranks"), lines.index("## Open MPI, 3 ranks")
    assert lines[5:8] == [
        "    # 2,3 ranks on 2 processors (some), 8 GiB, Linux 6.1, load before 0.5",
        "    # ftcomm 0.1.0",
        "    # rounds=15",
    ]
    assert lines[two + 2 : two + 5] == ["| bytes | barrier |", "| --- | --- |", "|  | **0.25** (4.0) |"]
    assert lines[three + 2 :] == [
        "| bytes | all-reduce | all-gather |",
        "| --- | --- | --- |",
        "| 8 B | 2.50 (1.5) | 0.90 (2.0) |",
        "| 4 KiB | **0.71** (35) |  |",
    ]


def test_an_unknown_name_is_an_error() -> None:
    ended = run_all("--only", "al_reduce")
    assert ended.returncode == 1
    assert "There are: all_reduce-2" in ended.stderr
