"""Logs in a global store as the tests write them: records, uploads, and an uploader in a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from uploads.upload_worker import record

from ftcomm.recovery import places
from ftcomm.recovery.global_store import LogRecord, LogUploader

WORKER = Path(__file__).with_name("upload_worker.py")
JOB, NAME = "job-1", "0-to-1"
CHUNK = 500  # a few records each


def records(first: int, last: int) -> list[LogRecord]:
    return [record(seq) for seq in range(first, last + 1)]


def upload(url: str, first: int = 1, last: int = 20, name: str = NAME, job: str = JOB) -> None:
    with LogUploader(url, job, name, chunk_bytes=CHUNK) as log:
        for one in records(first, last):
            log.append(one)


def objects(url: str, job: str = JOB, name: str = NAME) -> dict[str, bytes]:
    place = places.open_place(url)
    folder = f"{job}/{name}"
    return {name: place.get(f"{folder}/{name}") for name in sorted(place.names(folder))}


def overwrite(url: str, name: str, data: bytes) -> None:
    place = places.open_place(url)
    place.delete(f"{JOB}/{NAME}/{name}")
    place.put(f"{JOB}/{NAME}/{name}", data)


class Worker:
    """upload_worker.py."""

    def __init__(self, url: str, chunk_bytes: int = CHUNK) -> None:
        command = [sys.executable, str(WORKER), url, JOB, NAME, str(chunk_bytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.next_seq = int(self.answer().removeprefix("next "))

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        assert self.end() == -signal.SIGKILL
