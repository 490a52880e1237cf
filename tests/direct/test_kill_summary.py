"""What `make tables` says at its end, of cells that ran in other processes than the summary."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.table
def test_cells_of_all_processes_are_counted() -> None:
    """A point that no cell hits would fail the whole run: one that is hit must not be taken for such a one."""
    cells = ["tests/direct/test_tables.py::test_kill_in_an_operation", "-m", "table", "-k", "ring.enter-tcp-3"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *cells],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["ring.enter", "tcp", "killed", "in", "3", "of", "3", "cells"] in lines, done.stdout
