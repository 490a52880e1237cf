"""ftrun for tests: needs torch."""

from __future__ import annotations

import errno
import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from launch.running import Ftrun, Kept, Start, clean_environment
from launch.speaking import WORKER, Replay

from ftcomm.launch import retries, worker


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """start(script_text, *flags) -> Ftrun; whatever still runs at the end of the test is killed."""
    started: list[Ftrun] = []
    workers = request.node.get_closest_marker("execs_workers") is None

    def begin(script: str, *flags: str, stderr: int = subprocess.PIPE, **extra_env: str) -> Ftrun:
        path = tmp_path / f"script{len(started)}.py"
        path.write_text(textwrap.dedent(script))
        env = clean_environment(WORK=str(tmp_path), TMPDIR=str(tmp_path), **extra_env)
        started.append(Ftrun([*flags, str(path)], env, stderr, workers=workers))
        return started[-1]

    yield begin
    for ftrun in started:
        if ftrun.process.poll() is None:
            ftrun.process.kill()
            ftrun.process.communicate()


@pytest.fixture
def replay(start: Start, tmp_path: Path) -> Replay:
    def begin(script: str, ranks: int, *flags: str, fifos: int = 0) -> Ftrun:
        for n in range(fifos):
            os.mkfifo(tmp_path / f"fifo{n}")
        place = ("--policy", "replay", "--pair-log", str(tmp_path))
        return start(WORKER + script, "--nproc-per-node", str(ranks), *place, *flags)

    return begin


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many starts of replacements in a row are refused by the kernel, from now on. ftrun is forked from here."""

    def refuse(times: int) -> None:
        whole, left = worker.Worker._popen, [times]

        def popen(self: worker.Worker, args: Any, env: dict[str, str]) -> Any:
            if env["FTCOMM_INCARNATION"] != "0" and left[0] > 0:
                left[0] -= 1
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            return whole(self, args, env)

        monkeypatch.setattr(worker.Worker, "_popen", popen)
        monkeypatch.setattr(retries, "FIRST", 0.05)

    return refuse


@pytest.fixture
def kept() -> Iterator[Kept]:
    one = Kept()
    yield one
    one.process.kill()
    one.process.communicate()
