"""What no reader needs any more is collected."""

from __future__ import annotations

from pathlib import Path

import pytest
from uploads.logs import CHUNK, JOB, NAME, objects, records, upload

from ftcomm.errors import ConfigError, LogCorrupt
from ftcomm.recovery import chunks
from ftcomm.recovery.global_store import LogUploader, collect, fetch, remove


def test_collect(url: str) -> None:
    upload(url)
    names = sorted(objects(url))
    assert collect(url, JOB, NAME, 0) == 0
    second = chunks.parse_header(objects(url)[names[1]], "", chunks.CHUNK, JOB, NAME, 1)
    assert collect(url, JOB, NAME, second.last_seq - 1) == 1
    assert collect(url, JOB, NAME, second.last_seq - 1) == 0
    assert collect(url, JOB, NAME, second.last_seq) == 1
    assert sorted(objects(url)) == names[2:]
    start = second.last_seq + 1
    assert list(fetch(url, JOB, NAME, from_seq=start)) == records(start, 20)
    with pytest.raises(LogCorrupt, match=f"begins with record {start} in chunk 2"):
        list(fetch(url, JOB, NAME, from_seq=start - 1, follow=True))
    upload(url)  # again from the first record: those that were collected are skipped
    assert sorted(objects(url)) == names[2:]
    assert collect(url, JOB, NAME, 20) == len(names) - 3
    assert sorted(objects(url)) == ["end.ftlog"]
    assert list(fetch(url, JOB, NAME, from_seq=21)) == []
    with pytest.raises(LogCorrupt, match="No chunk of .* is left"):
        list(fetch(url, JOB, NAME, from_seq=20))
    with pytest.raises(ConfigError, match="was collected"):
        LogUploader(url, JOB, NAME)


def test_collect_while_the_upload_goes_on(url: str) -> None:
    log = LogUploader(url, JOB, NAME, chunk_bytes=CHUNK)
    for one in records(1, 10):
        log.append(one)
    log.flush()
    chunks_before = len(objects(url))
    assert collect(url, JOB, NAME, 10) == chunks_before - 1
    assert len(objects(url)) == 1
    log.abandon()
    with LogUploader(url, JOB, NAME, chunk_bytes=CHUNK) as log:
        assert log.next_seq == 11
        for one in records(11, 20):
            log.append(one)
    assert list(fetch(url, JOB, NAME, from_seq=11)) == records(11, 20)


def test_remove_takes_only_what_is_ours(tmp_path: Path) -> None:
    url = str(tmp_path)
    upload(url)
    upload(url, name="other")
    upload(url, job="job-2")
    (tmp_path / JOB / NAME / ".x.tmp").write_bytes(b"of a killed uploader")
    (tmp_path / JOB / "notes.txt").write_text("mine")
    (tmp_path / JOB / "folder").mkdir()
    (tmp_path / JOB / "folder" / "data").write_text("mine")
    assert remove(url, JOB) == 2 * len(objects(url, "job-2")) + 1
    assert sorted(str(path.relative_to(tmp_path / JOB)) for path in (tmp_path / JOB).rglob("*")) == [
        "folder", "folder/data", "notes.txt",
    ]  # fmt: skip
    assert list(fetch(url, "job-2", NAME)) == records(1, 20)
    assert remove(url, "job-2") > 0
    assert not (tmp_path / "job-2").exists()
    assert remove(url, "never-there") == 0
