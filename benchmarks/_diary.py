"""What the processes of a benchmark tell its driver: a file of each, a line of JSON for each event."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Diary:
    """Times are nanoseconds of CLOCK_MONOTONIC, one clock for all processes of the machine."""

    def __init__(self, folder: Path, rank: int, process: int) -> None:
        self._fd = os.open(folder / f"diary-{rank}-{process}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._who = {"rank": rank, "process": process}

    def note(self, what: str, when: int | None = None, **more: Any) -> None:
        line = {**self._who, "what": what, "when": time.monotonic_ns() if when is None else when, **more}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def read_diaries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for diary in folder.glob("diary-*") for line in diary.read_text().splitlines()]


def process_number() -> int:
    """_elastic.py and ftrun count a slot's processes, torchrun how often it has restarted all."""
    names = ("PROCESS_NUMBER", "FTCOMM_INCARNATION", "TORCHELASTIC_RESTART_COUNT")
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))


def born() -> int:
    """When this process was started, to a hundredth of a second: nanoseconds of CLOCK_MONOTONIC."""
    since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(1e9 * since_boot)
