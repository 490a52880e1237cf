"""Places for logs: directories, fsspec's file systems, and a real S3 server that the tests start."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from uploads.logs import Worker

_buckets = itertools.count()


@pytest.fixture(scope="session")
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
