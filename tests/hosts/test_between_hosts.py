"""benchmarks/between_hosts.py: its line has the delay that it says, and no process or device is left of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "between_hosts.py"
SHORT = [
    "--peers",
    "ftcomm",
    "--sizes",
    "8,64K",
    "--rounds",
    "1",
    "--iperf-seconds",
    "1",
    "--rate",
    "1G",
    "--delay",
    "5ms",
]


def marked(text: str) -> list[int]:
    """Processes with that in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("_possible")
@pytest.mark.table
def test_it_measures_on_a_line_with_a_delay(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(PROGRAM), *SHORT, "--json", str(found)]
    ended = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if "is left out" in ended.stdout:
        pytest.skip(ended.stdout)
    (line,) = json.loads(found.read_text())["lines"]
    assert line["round_trip"] >= 2 * line["delay"] == 0.01
    for cell in line["cells"]:
        assert cell["wire"]["ftcomm"] >= cell["bytes"]
        assert min(cell["seconds"]["ftcomm"]) >= line["delay"]


@pytest.mark.usefixtures("_possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_it(tmp_path: Path, number: signal.Signals) -> None:
    mark = f"BETWEEN_HOSTS_TEST={tmp_path}"
    process = started(mark)
    while len(marked(mark)) < 5 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    all_gone(mark)


SLOW = r"""#!/bin/sh
case "$*" in *_hosts_ranks*) ;; *) exec "$NSENTER" "$@" ;; esac
host=$2
shift 4
exec 3<"/proc/$host/ns/net" 4<"/proc/$host/ns/uts"
: >"$0.$host"
tail --pid="$host" -f /dev/null
exec "$NSENTER" --net=/proc/self/fd/3 --uts=/proc/self/fd/4 "$@"
"""


@pytest.mark.usefixtures("_possible")
def test_a_rank_that_is_not_on_its_host_yet(tmp_path: Path) -> None:
    """The benchmark is killed while its ranks are on their way: a host kills who is there, and is gone when they come."""
    mark, slow = f"BETWEEN_HOSTS_TEST={tmp_path}", tmp_path / "nsenter"
    slow.write_text(SLOW)
    slow.chmod(0o700)
    found = shutil.which("nsenter")
    assert found is not None
    process = started(mark, f"PATH={tmp_path}:{os.environ['PATH']}", f"NSENTER={found}")
    while len(list(tmp_path.glob("nsenter.*"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)
    all_gone(mark)


def started(*environment: str) -> subprocess.Popen[bytes]:
    command = [
        "env",
        *environment,
        sys.executable,
        str(PROGRAM),
        *SHORT,
        "--delay",
        "0",
        "--sizes",
        "64M",
        "--rounds",
        "500",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def all_gone(mark: str) -> None:
    deadline = time.monotonic() + 60
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
