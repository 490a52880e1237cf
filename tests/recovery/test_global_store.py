"""Logs in a global store: a directory, fsspec's file systems, and a real S3 server that the tests start."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcomm.errors import Closed, ConfigError, LogCorrupt, SystemFailure, Timeout, Unsupported
from ftcomm.recovery import chunks, global_store, places
from ftcomm.recovery.global_store import LogRecord, LogUploader, collect, fetch, remove

WORKER = Path(__file__).with_name("upload_worker.py")
JOB, NAME = "job-1", "0-to-1"
CHUNK = 500  # a few records each
_buckets = itertools.count()


def _load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("upload_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record: Callable[..., LogRecord] = _load_worker().record


def records(first: int, last: int) -> list[LogRecord]:
    return [record(seq) for seq in range(first, last + 1)]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket; what an uploader needs to reach it is in the environment."""
    import s3fs

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"logs-{next(_buckets)}"
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/a/prefix"


# A server of its own for each: the whole of it with the tables, its basics (the last tests here) with every run.
S3 = pytest.param("s3", marks=pytest.mark.table)


@pytest.fixture(params=["directory", "file", "local", pytest.param("memory", marks=pytest.mark.table), S3])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same tests on each: no fsspec for the first two; the third is one of its file systems that need a rename."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    if request.param in ("local", "memory"):
        pytest.importorskip("fsspec")
    folder = tmp_path / "logs"
    return {"directory": str(folder), "memory": f"memory://{folder}"}.get(request.param, f"{request.param}://{folder}")


@pytest.fixture(params=["directory", S3])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One that several processes see."""
    return str(request.getfixturevalue("s3_url")) if request.param == "s3" else str(tmp_path / "logs")


@pytest.fixture(autouse=True)
def _no_stray_threads() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ftcomm-")] == []


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


@pytest.fixture
def worker() -> Iterator[Callable[[str], Worker]]:
    made: list[Worker] = []

    def make(url: str) -> Worker:
        made.append(Worker(url))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.kill()


# Upload and fetch


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


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 201, "\n", "é" * 100])
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
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
    for arguments in ({"from_seq": 0}, {"prefetch": 0}, {"timeout": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            fetch(str(tmp_path), JOB, NAME, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="chunk_bytes"):
        LogUploader(str(tmp_path), JOB, NAME, chunk_bytes=0)


def test_without_fsspec_or_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hidden:
        hidden.setitem(sys.modules, "fsspec", None)
        with pytest.raises(ConfigError, match=r"pip install ftcomm\[store\]"):
            fetch("s3://bucket/logs", JOB, NAME)
    fsspec = pytest.importorskip("fsspec")
    fsspec.registry  # noqa: B018 - imported before its parts are hidden
    monkeypatch.setitem(sys.modules, "pygit2", None)
    with pytest.raises(ConfigError, match=r"pip install ftcomm\[store\].*pygit2"):
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


# Following


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


# Crashes


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


# Damage


def test_a_damaged_record_is_named(url: str) -> None:
    upload(url)
    name = "00000002.ftlog"
    data = bytearray(objects(url)[name])
    header = chunks.parse_header(bytes(data), "", chunks.CHUNK, JOB, NAME, 2)
    second = header.first_seq + 1
    at = bytes(data).index(bytes(record(second).payload))
    data[at + 50] ^= 1
    overwrite(url, name, bytes(data))
    fetched = fetch(url, JOB, NAME)
    assert list(itertools.islice(fetched, header.first_seq - 1)) == records(1, header.first_seq - 1)
    with pytest.raises(LogCorrupt, match=rf"Chunk 2 \(.*{name}\): record {second}, number 2 in the chunk, fails"):
        next(fetched)


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    upload(str(tmp_path), 1, 3)
    data = objects(str(tmp_path))["00000000.ftlog"]
    assert list(chunks.parse(data, "it", JOB, NAME, 0).records()) == records(1, 3)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises((LogCorrupt, Unsupported)):
            chunks.parse(bytes(damaged), "it", JOB, NAME, 0)
        with pytest.raises(LogCorrupt):
            chunks.parse(data[:at], "it", JOB, NAME, 0)
    with pytest.raises(LogCorrupt):
        chunks.parse(data + b"\0", "it", JOB, NAME, 0)


def test_a_damaged_end_marker(url: str) -> None:
    upload(url)
    overwrite(url, "end.ftlog", objects(url)["end.ftlog"][:-1] + b"?")
    with pytest.raises(LogCorrupt, match=r"End marker \(.*end.ftlog\): the header fails its check"):
        list(fetch(url, JOB, NAME, follow=True))


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_a_missing_chunk_is_named(url: str, follow: bool, ended: bool) -> None:
    upload(url)
    place = places.open_place(url)
    place.delete(f"{JOB}/{NAME}/00000002.ftlog")
    if not ended:
        place.delete(f"{JOB}/{NAME}/end.ftlog")
    with pytest.raises(LogCorrupt, match=r"Chunk 2 \(.*00000002.ftlog\) is missing, with the records after \d+"):
        list(fetch(url, JOB, NAME, follow=follow))


@pytest.mark.parametrize("follow", [False, True])
def test_a_missing_last_chunk_is_named(url: str, follow: bool) -> None:
    upload(url)
    last = sorted(objects(url))[-2]
    places.open_place(url).delete(f"{JOB}/{NAME}/{last}")
    with pytest.raises(
        LogCorrupt, match=rf"{last}\) is missing.*the end marker is there, which says . chunks and 20 records"
    ):
        list(fetch(url, JOB, NAME, follow=follow))


def test_chunks_beyond_the_end(tmp_path: Path) -> None:
    upload(str(tmp_path), 1, 3)
    end = objects(str(tmp_path))["end.ftlog"]
    remove(str(tmp_path), JOB)
    upload(str(tmp_path))
    overwrite(str(tmp_path), "end.ftlog", end)
    with pytest.raises(LogCorrupt, match="which says 1 chunks and 3 records up to 3"):
        list(fetch(str(tmp_path), JOB, NAME))
    with pytest.raises(LogCorrupt, match="end marker for 1 chunks"):
        LogUploader(str(tmp_path), JOB, NAME)


def test_a_chunk_of_another_job(url: str) -> None:
    upload(url)
    upload(url, job="job-2")
    overwrite(url, "00000001.ftlog", objects(url, "job-2")["00000001.ftlog"])
    with pytest.raises(
        ConfigError, match="Chunk 1 .* belongs to the log '0-to-1' of job 'job-2', not to '0-to-1' of 'job-1'"
    ):
        list(fetch(url, JOB, NAME))


def test_a_chunk_of_another_place_in_the_log(url: str) -> None:
    upload(url)
    overwrite(url, "00000001.ftlog", objects(url)["00000002.ftlog"])
    with pytest.raises(LogCorrupt, match="Chunk 1 .* holds chunk 2"):
        list(fetch(url, JOB, NAME))


def test_chunks_that_do_not_follow_each_other(tmp_path: Path) -> None:
    """Two uploaders on a store that can't refuse the second one."""
    upload(str(tmp_path), 1, 6)
    other = chunks.Header(chunks.CHUNK, JOB, NAME, 1, 4, 1, 6, 6)
    overwrite(str(tmp_path), "00000001.ftlog", chunks.encode(other, [chunks.pack_record(record(6))]))
    with pytest.raises(LogCorrupt, match="Chunk 1 .* begins with record 6, but the chunk before it ends with 3"):
        list(fetch(str(tmp_path), JOB, NAME))


def test_a_newer_version(url: str) -> None:
    upload(url)
    data = objects(url)["00000001.ftlog"]
    overwrite(url, "00000001.ftlog", data[:4] + b"\x02\x00" + data[6:])
    with pytest.raises(Unsupported, match="Chunk 1 .* has format version 2; this ftcomm reads up to 1"):
        list(fetch(url, JOB, NAME))
    with pytest.raises(ConfigError, match="There is no log 'x' .* there: 0-to-1"):
        list(fetch(url, JOB, "x"))


def test_damage_before_the_first_record_needed_does_no_harm(tmp_path: Path) -> None:
    upload(str(tmp_path), 1, 40)
    for number in range(8):  # the search for the record looks at the last of them
        overwrite(str(tmp_path), f"{number:08d}.ftlog", b"nothing")
    assert list(fetch(str(tmp_path), JOB, NAME, from_seq=30)) == records(30, 40)


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    """The bytes of docs/global-store.md, by hand."""
    with LogUploader(str(tmp_path), "j", "nm") as log:
        log.append(LogRecord(5, 1, 2, 3, 4, b"abc"))
    body = b"".join(n.to_bytes(8, "little") for n in (5, 1, 2, 3, 4, 3)) + b"abc"
    body = zlib.crc32(body).to_bytes(4, "little") + bytes(4) + body + bytes(5)
    numbers = b"".join(n.to_bytes(8, "little") for n in (0, 0, 1, 5, 5, len(body)))
    header = b"FTLG" + bytes([1, 0, 1, 0, 80, 0, 0, 0, 1, 0, 2, 0]) + numbers + zlib.crc32(body).to_bytes(4, "little")
    header = (header + b"jnm").ljust(76, b"\0")
    expected = header + zlib.crc32(header).to_bytes(4, "little") + body
    assert objects(str(tmp_path), "j", "nm")["00000000.ftlog"] == expected


# Collection


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
