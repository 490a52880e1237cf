"""Logs in a global store: uploaded, fetched."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from uploads.logs import JOB, NAME, objects, records, upload
from uploads.upload_worker import record

from ftcomm.errors import Closed, ConfigError, LogCorrupt, SystemFailure
from ftcomm.recovery.global_store import LogRecord, LogUploader, collect, fetch, remove


def test_what_was_appended_is_fetched(url: str) -> None:
    upload(url)
    assert len(objects(url)) > 4
    assert list(fetch(url, JOB, NAME)) == records(1, 20)
    assert list(fetch(url, JOB, NAME, follow=True, prefetch=3)) == records(1, 20)


@pytest.mark.parametrize("start", [2, 4, 5, 11, 20, 21, 99])
def test_fetch_from_a_record(url: str, start: int) -> None:
    upload(url)
    assert list(fetch(url, JOB, NAME, from_seq=start)) == records(start, 20)


def test_an_empty_log_is_complete(url: str) -> None:
    with LogUploader(url, JOB, NAME):
        pass
    assert list(fetch(url, JOB, NAME, follow=True, timeout=0)) == []


def test_payloads_of_all_kinds(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    reused = bytearray(b"before")
    payloads: list[Any] = [b"", np.empty((0, 3)), reused, array, memoryview(b"view"), array[:, ::2], b"x" * 3000]
    with LogUploader(str(tmp_path), JOB, NAME, chunk_bytes=1000) as log:
        for seq, payload in enumerate(payloads, 1):
            log.append(LogRecord(seq, -(2**63), 2**63 - 1, 0, 0, payload))
        reused[:] = b"after!"
    found = [bytes(one.payload) for one in fetch(str(tmp_path), JOB, NAME)]
    assert found == [b"", b"", b"before", array.tobytes(), b"view", array[:, ::2].tobytes(), b"x" * 3000]
    first = next(iter(fetch(str(tmp_path), JOB, NAME)))
    assert (first.tag, first.aux) == (-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    "bad", [{"payload": "text"}, {"payload": 3}, {"tag": 2**63}, {"step": 1.5}, {"seq": 0}, {"seq": -1}]
)
def test_records_that_can_not_be_logged(tmp_path: Path, bad: dict[str, Any]) -> None:
    with LogUploader(str(tmp_path), JOB, NAME) as log:
        with pytest.raises(ConfigError, match="can't be"):
            log.append(dataclasses.replace(record(1), **bad))
        log.append(record(1))
    assert list(fetch(str(tmp_path), JOB, NAME)) == [record(1)]


def test_a_gap_is_refused(tmp_path: Path) -> None:
    with LogUploader(str(tmp_path), JOB, NAME) as log:
        log.append(record(5))
        for seq in (4, 5, 7):
            with pytest.raises(ConfigError, match="the next one is 6"):
                log.append(record(seq))
    with pytest.raises(LogCorrupt, match="begins with record 5 in chunk 0: records 1 to 4 .* from_seq=5"):
        list(fetch(str(tmp_path), JOB, NAME))
    assert list(fetch(str(tmp_path), JOB, NAME, from_seq=5)) == [record(5)]


def test_an_exception_leaves_no_end_marker(url: str) -> None:
    with pytest.raises(ZeroDivisionError), LogUploader(url, JOB, NAME) as log:
        log.append(record(1))
        log.flush()
        log.append(record(2))
        raise ZeroDivisionError
    with pytest.raises(Closed):
        log.append(record(3))
    fetched = fetch(url, JOB, NAME)
    assert next(fetched) == record(1)
    with pytest.raises(LogCorrupt, match="not complete: chunk 1, the records after 1 and the end marker are missing"):
        next(fetched)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 201, "\n", "é" * 100, None, 7, b"name", ["name"]])
def test_names_that_are_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match="name"):
        fetch(str(tmp_path), JOB, name)
    with pytest.raises(ConfigError, match="name"):
        LogUploader(str(tmp_path), name, NAME)


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a#b?c%d*[e]", "end.ftlog", "ü"])
def test_names_with_a_meaning_elsewhere(url: str, name: str) -> None:
    upload(url, name=name, job=name)
    upload(url, 1, 3, name="other", job="other")
    assert list(fetch(url, name, name)) == records(1, 20)
    assert remove(url, name) > 4
    assert list(fetch(url, "other", "other")) == records(1, 3)
    with pytest.raises(ConfigError, match="There is no log"):
        list(fetch(url, name, name))


def test_wrong_arguments(tmp_path: Path) -> None:
    for wrong in ("", "file://host/path", "file://"):
        with pytest.raises(ConfigError, match="ABSOLUTE"):
            fetch(wrong, JOB, NAME)
    with pytest.raises(ConfigError, match="storage_options"):
        fetch(str(tmp_path), JOB, NAME, storage_options={"key": "x"})
    with pytest.raises(ConfigError, match="timeout=nan"):
        fetch(str(tmp_path), JOB, NAME, timeout=float("nan"))
    for count in (None, 0, -1, 1.5, "5", [], True):
        for name in ("from_seq", "prefetch"):
            with pytest.raises(ConfigError, match=name):
                fetch(str(tmp_path), JOB, NAME, **{name: count})
        for name in ("chunk_bytes", "queue_chunks"):
            with pytest.raises(ConfigError, match=name):
                LogUploader(str(tmp_path), JOB, NAME, **{name: count})
        if count != 0:
            with pytest.raises(ConfigError, match="through_seq"):
                collect(str(tmp_path), JOB, NAME, count)
    for timeout in (-1, "5", []):
        with pytest.raises(ConfigError, match="timeout"):
            fetch(str(tmp_path), JOB, NAME, timeout=timeout)  # type: ignore[arg-type]
    with LogUploader(str(tmp_path), JOB, NAME) as log, pytest.raises(ConfigError, match="LogRecords"):
        log.append(b"payload")  # type: ignore[arg-type]


@pytest.mark.parametrize("url", [None, 3, b"/tmp", ["/tmp"], "a\0b", "s3:/bucket/logs", "file:/tmp/logs"])
def test_urls_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any) -> None:
    """With one slash it would be a folder in this host's working directory, which no replacement elsewhere sees."""
    monkeypatch.chdir(tmp_path)
    for call in (lambda: LogUploader(url, JOB, NAME), lambda: fetch(url, JOB, NAME), lambda: remove(url, JOB)):
        with pytest.raises(ConfigError, match=r"The global store .* is no(t valid| URL)"):
            call()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="storage_options"):
        fetch("memory://logs", JOB, NAME, storage_options=[1])  # type: ignore[arg-type]


def test_without_fsspec_or_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "fsspec", None)
        with pytest.raises(ConfigError, match="pip install fsspec s3fs"):
            fetch("s3://bucket/logs", JOB, NAME)
    fsspec = pytest.importorskip("fsspec")
    fsspec.registry  # noqa: B018 - imported before its parts are hidden
    monkeypatch.setitem(sys.modules, "pygit2", None)
    with pytest.raises(ConfigError, match="not installed .*fsspec says: .*pygit2"):
        fetch("git://somewhere", JOB, NAME)
    with pytest.raises(ConfigError, match="nosuch"):
        fetch("nosuch://somewhere", JOB, NAME)


def test_storage_options(s3_url: str, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = {"endpoint_url": s3, "key": "test", "secret": "test"}
    with LogUploader(s3_url, JOB, NAME, storage_options=options) as log:
        log.append(record(1))
    assert list(fetch(s3_url, JOB, NAME, storage_options=options)) == [record(1)]
    assert remove(s3_url, JOB, storage_options=options) == 2


def test_a_bucket_that_is_not_there(s3_url: str) -> None:
    log = LogUploader("s3://no-such-bucket/logs", JOB, NAME)
    log.append(record(1))
    with pytest.raises(
        SystemFailure, match=r"Chunk 0 of .*bucket does not exist.*No record is there yet\. When the cause"
    ):
        log.close()


def test_a_store_that_can_not_be_reached(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    options = {
        "endpoint_url": "http://127.0.0.1:9",
        "key": "test",
        "secret": "test",
        "config_kwargs": {"retries": {"total_max_attempts": 1}},
    }
    with pytest.raises(SystemFailure, match="can't be listed"):
        LogUploader(s3_url, JOB, NAME, storage_options=options)
    with pytest.raises(SystemFailure, match="can't be listed"):
        list(fetch(s3_url, JOB, NAME, storage_options=options, follow=True))
