"""ftrun for tests: needs torch."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launch.running import Ftrun, Start, clean_environment


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(script_text, *flags) -> Ftrun; whatever still runs at the end of the test is killed."""
    started: list[Ftrun] = []

    def begin(script: str, *flags: str, stderr: int = subprocess.PIPE, **extra_env: str) -> Ftrun:
        path = tmp_path / f"script{len(started)}.py"
        path.write_text(textwrap.dedent(script))
        env = clean_environment(WORK=str(tmp_path), TMPDIR=str(tmp_path), **extra_env)
        started.append(Ftrun([*flags, str(path)], env, stderr))
        return started[-1]

    yield begin
    for ftrun in started:
        if ftrun.process.poll() is None:
            ftrun.process.kill()
            ftrun.process.communicate()
