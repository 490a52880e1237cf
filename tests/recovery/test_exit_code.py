"""What an atexit callback can know of the process's exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ftcomm

SCRIPT = """
import atexit, sys, threading
sys.path.insert(0, sys.argv[1])
import exit_code
exit_code.watch()
atexit.register(lambda: print(exit_code.failed(), flush=True))
"""


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ("pass", False),
        ("sys.exit()", False),
        ("sys.exit(0)", False),
        ("raise SystemExit", False),
        ("sys.exit(3)", True),
        ("raise SystemExit(3)", True),
        ("raise SystemExit('words')", True),
        ("1 / 0", True),
        ("try: raise SystemExit(3)\nexcept SystemExit as end: assert end.code == 3", False),
        ("one = threading.Thread(target=sys.exit, args=(3,)); one.start(); one.join()", False),
    ],
)
def test_exit_codes_are_known_at_exit(end: str, failed: bool) -> None:
    folder = str(Path(ftcomm.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + end, folder], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{failed}\n"
    assert (done.returncode != 0) == failed
