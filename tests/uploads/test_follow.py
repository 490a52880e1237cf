"""Readers that follow a log while it is written."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from uploads.logs import JOB, NAME, Worker, records, upload
from uploads.upload_worker import record

from ftcomm.errors import Timeout
from ftcomm.recovery import global_store, places
from ftcomm.recovery.global_store import LogRecord, LogUploader, fetch


def test_following_a_writer_in_another_process(shared_url: str, worker: Callable[[str], Worker]) -> None:
    """Every record that was flushed comes out while the writer is still there; the end only with its marker."""
    writer = worker(shared_url)
    fetched = fetch(shared_url, JOB, NAME, follow=True)
    seq = 0
    for count in (1, 7, 40, 1):
        assert writer.tell(f"append {count}") == "done append"
        assert writer.tell("flush") == "done flush"
        for one in itertools.islice(fetched, count):
            seq += 1
            assert one == record(seq)
    assert seq == 49
    assert writer.tell("append 20") == "done append"
    assert writer.tell("close") == "done close"
    assert list(fetched) == records(50, 69)
    assert writer.end() == 0


def test_following_from_before_the_first_chunk(shared_url: str, worker: Callable[[str], Worker]) -> None:
    found: list[LogRecord] = []
    reader = threading.Thread(target=lambda: found.extend(fetch(shared_url, JOB, NAME, follow=True, timeout=100)))
    reader.start()
    writer = worker(shared_url)
    assert writer.tell("append 200") == "done append"
    assert writer.tell("close") == "done close"
    reader.join()
    assert found == records(1, 200)


def test_timeout_names_what_is_missing(shared_url: str) -> None:
    with pytest.raises(Timeout, match="did not appear within 0.05 s.*chunk 0 is missing"):
        list(fetch(shared_url, JOB, NAME, follow=True, timeout=0.05))
    log = LogUploader(shared_url, JOB, NAME)
    log.append(record(1))
    log.flush()
    fetched = fetch(shared_url, JOB, NAME, follow=True, timeout=0.05)
    assert next(fetched) == record(1)
    with pytest.raises(Timeout, match="chunk 1, the records after 1 and the end marker are missing"):
        next(fetched)
    log.close()


def test_ctrl_c_ends_the_wait(shared_url: str, worker: Callable[[str], Worker]) -> None:
    writer = worker(shared_url)
    writer.tell("append 1")
    writer.tell("flush")
    fetched = fetch(shared_url, JOB, NAME, follow=True)
    assert next(fetched) == record(1)

    def only_in_the_wait(signum: int, frame: Any) -> None:
        if frame.f_code.co_name == "next" and frame.f_code.co_filename == global_store.__file__:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    before = signal.signal(signal.SIGALRM, only_in_the_wait)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        with pytest.raises(KeyboardInterrupt):
            next(fetched)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_fetch_that_is_given_up_ends_its_thread(url: str) -> None:
    upload(url, 1, 100)
    fetched = fetch(url, JOB, NAME, follow=True)
    assert next(fetched) == record(1)
    fetched.close()


def test_prefetch_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the caller holds one chunk, exactly ``prefetch`` others are read."""
    upload(str(tmp_path), 1, 100)
    read: list[str] = []
    change = threading.Condition()
    get = places.Directory.get

    def counted(self: places.Directory, path: str) -> bytes:
        with change:
            read.append(path)
            change.notify()
        return get(self, path)

    monkeypatch.setattr(places.Directory, "get", counted)
    fetched = fetch(str(tmp_path), JOB, NAME, prefetch=2)
    next(fetched)
    with change:
        assert change.wait_for(lambda: len(read) == 3, 60)
        assert not change.wait_for(lambda: len(read) > 3, 0.2)
    fetched.close()


def test_back_pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the store stuck, the caller gets as far as the queue is long, and no further."""
    stuck = threading.Event()
    put = places.Directory.put
    monkeypatch.setattr(places.Directory, "put", lambda self, *args: (stuck.wait(), put(self, *args))[1])
    appended: list[int] = []
    change = threading.Condition()

    def write() -> None:
        with LogUploader(str(tmp_path), JOB, NAME, chunk_bytes=1, queue_chunks=2) as log:
            for one in records(1, 10):
                log.append(one)
                with change:
                    appended.append(one.seq)
                    change.notify()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with change:
            assert change.wait_for(lambda: len(appended) == 3, 60)  # one is being written, two wait
            assert not change.wait_for(lambda: len(appended) > 3, 0.2)
    finally:
        stuck.set()
        writer.join()
    assert list(fetch(str(tmp_path), JOB, NAME)) == records(1, 10)
