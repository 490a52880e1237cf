"""An uploader dies, is started again, finds the disk full."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from uploads.logs import CHUNK, JOB, NAME, Worker, objects, overwrite, records, upload
from uploads.upload_worker import record

from ftcomm.errors import ConfigError, LogCorrupt
from ftcomm.recovery import places
from ftcomm.recovery.global_store import LogUploader, fetch


def test_killed_in_the_middle_of_a_chunk(tmp_path: Path, worker: Callable[[str], Worker]) -> None:
    """The half-written file is never seen; the next uploader removes it and goes on after the last whole chunk."""
    url = str(tmp_path)
    first = worker(url)
    first.tell("append 10")
    first.tell("flush")
    before = objects(url)
    first.tell("die 10")
    assert first.end() == -signal.SIGKILL
    assert [name for name in objects(url) if name.endswith(".tmp")] != []
    assert {name: data for name, data in objects(url).items() if name.endswith(".ftlog")} == before
    second = worker(url)
    assert second.next_seq == 11
    second.tell("append 10")
    assert second.tell("close") == "done close"
    after = objects(url)
    assert [name for name in after if name.endswith(".tmp")] == []
    assert {name: after[name] for name in before} == before
    assert list(fetch(url, JOB, NAME)) == records(1, 20)


def test_killed_while_a_reader_follows(shared_url: str, worker: Callable[[str], Worker]) -> None:
    first = worker(shared_url)
    first.tell("append 10")
    first.tell("flush")
    first.tell("append 3")  # some of them may arrive
    fetched = fetch(shared_url, JOB, NAME, follow=True)
    found = list(itertools.islice(fetched, 10))
    first.kill()
    second = worker(shared_url)
    assert 11 <= second.next_seq <= 14
    second.tell("append 30")
    assert second.tell("close") == "done close"
    assert found + list(fetched) == records(1, second.next_seq + 29)


def test_what_is_appended_again_is_compared_and_not_written(url: str) -> None:
    with pytest.raises(ZeroDivisionError), LogUploader(url, JOB, NAME, chunk_bytes=CHUNK) as log:
        for one in records(1, 13):
            log.append(one)
        log.flush()
        raise ZeroDivisionError
    before = objects(url)
    for start in (1, 6, 13):
        log = LogUploader(url, JOB, NAME, chunk_bytes=300)
        assert log.next_seq == 14
        for one in records(start, 13):
            log.append(one)
        log.flush()
        log.abandon()
        assert objects(url) == before
    again = LogUploader(url, JOB, NAME, chunk_bytes=CHUNK)  # the last of them and the first new one share no chunk
    for one in records(1, 20):
        again.append(one)
    again.close()
    after = objects(url)
    assert {name: after[name] for name in before} == before
    assert list(fetch(url, JOB, NAME)) == records(1, 20)


@pytest.mark.parametrize("field", ["tag", "aux", "step", "micro_batch", "payload"])
def test_what_is_appended_again_must_be_the_same(tmp_path: Path, field: str) -> None:
    upload(str(tmp_path))
    log = LogUploader(str(tmp_path), JOB, NAME)
    wrong = bytes(record(7).payload[:-1]) + b"!" if field == "payload" else 12345
    for one in records(1, 8):
        log.append(dataclasses.replace(one, **{field: wrong}) if one.seq == 7 else one)
    with pytest.raises(ConfigError, match="Record 7 of .* is there already, and differs"):
        log.flush()
    with pytest.raises(ConfigError, match="Record 7"):
        log.append(record(9))
    with pytest.raises(ConfigError, match="Record 7"):
        log.close()


def test_what_is_appended_again_meets_a_chunk_whose_header_is_damaged(url: str) -> None:
    upload(url)
    overwrite(url, "00000002.ftlog", b"")
    log = LogUploader(url, JOB, NAME)
    for one in records(1, 20):
        log.append(one)
    with pytest.raises(LogCorrupt, match=r"Chunk 2 \(.*00000002.ftlog\) has 0 bytes"):
        log.close()


def test_a_complete_log(url: str) -> None:
    upload(url)
    before = objects(url)
    upload(url)
    assert objects(url) == before
    log = LogUploader(url, JOB, NAME)
    with pytest.raises(ConfigError, match="complete, with 20 records"):
        log.append(record(21))
    log.abandon()
    log = LogUploader(url, JOB, NAME)
    with pytest.raises(ConfigError, match="the next one is 21"):
        log.append(record(22))
    log.abandon()


def test_resume_replaces_only_what_is_damaged_at_the_end(url: str) -> None:
    upload(url)
    before = objects(url)
    last = sorted(before)[-2]
    overwrite(url, last, before[last][:-1])
    with LogUploader(url, JOB, NAME, chunk_bytes=CHUNK) as log:
        assert log.next_seq is not None
        assert log.next_seq <= 20
        for one in records(log.next_seq, 22):
            log.append(one)
    after = objects(url)
    whole = {name: data for name, data in before.items() if name not in (last, "end.ftlog")}
    assert {name: after[name] for name in whole} == whole
    assert list(fetch(url, JOB, NAME)) == records(1, 22)


def test_resume_refuses_a_log_with_a_hole(url: str) -> None:
    upload(url)
    places.open_place(url).delete(f"{JOB}/{NAME}/00000001.ftlog")
    with pytest.raises(LogCorrupt, match=r"Chunk 1 \(.*00000001.ftlog\) is missing, but later ones are there"):
        LogUploader(url, JOB, NAME)


def test_two_uploaders_of_one_log(url: str) -> None:
    """The second one finds out; what the first one wrote stays."""
    one, other = LogUploader(url, JOB, NAME), LogUploader(url, JOB, NAME)
    one.append(record(1))
    one.flush()
    other.append(record(1))
    other.flush()  # the same chunk: no harm
    one.append(record(2))
    one.close()
    for again in records(2, 3):
        other.append(again)
    with pytest.raises(ConfigError, match="another uploader writes the same log"):
        other.close()
    assert list(fetch(url, JOB, NAME)) == records(1, 2)


def test_a_second_uploader_leaves_what_the_first_is_writing(
    tmp_path: Path, worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins when the first one's temporary file is written and has no name yet."""
    url, link = str(tmp_path), os.link
    others = []

    def meanwhile(temporary: str, final: str) -> None:
        others.append(worker(url))
        link(temporary, final)

    with LogUploader(url, JOB, NAME, chunk_bytes=CHUNK) as log, monkeypatch.context() as patched:
        patched.setattr(os, "link", meanwhile)
        log.append(record(1))
        log.flush()
    assert [other.next_seq for other in others] == [1]
    assert list(fetch(url, JOB, NAME)) == records(1, 1)
    assert sorted(objects(url)) == ["00000000.ftlog", "end.ftlog"]


def test_disk_full(tmp_path: Path) -> None:
    """In a child whose files may have 4000 bytes: the error says what to do, and after it the upload goes on."""
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
from ftcomm.errors import SystemFailure
from ftcomm.recovery.global_store import LogRecord, LogUploader
log = LogUploader({str(tmp_path)!r}, {JOB!r}, {NAME!r})
log.append(LogRecord(1, 0, 0, 0, 0, b"small"))
log.flush()
log.append(LogRecord(2, 0, 0, 0, 0, b"x" * 10000))
for call in (log.flush, lambda: log.append(LogRecord(3, 0, 0, 0, 0, b"")), log.close):
    try:
        call()
    except SystemFailure as error:
        print(error)
"""
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = made.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "Chunk 1 of the log '0-to-1'" in line
        assert "File too large. Records up to 1 are there. When the cause is removed (space," in line
    assert sorted(objects(str(tmp_path))) == ["00000000.ftlog"]  # no rest
    with LogUploader(str(tmp_path), JOB, NAME) as log:
        assert log.next_seq == 2
        log.append(record(2))
    assert [one.seq for one in fetch(str(tmp_path), JOB, NAME)] == [1, 2]
