"""Fixtures for all tests; the harness is in harness.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import devices
import forked_parent
import harness
import kill_table
import pytest
import tables
from processors import on_one_processor

# torch's store asks the name server who connects, by the reverse of 127.0.0.1. One that loses queries costs 5 s each time else.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> None:
    for name in [name for name in os.environ if name.startswith("FTCOMM_") and name != "FTCOMM_SOAK_KILLS"]:
        del os.environ[name]
    # Else algorithms follow the maker of the processor (native/src/base/streaming.h), and failpoints with them.
    os.environ["FTCOMM_STREAM_LIMIT"] = str(1 << 40)
    # Nor how many processors it has, where that is not asked for.
    os.environ["FTCOMM_STAGE_LIMIT"] = str(1 << 40)


@pytest.fixture(scope="session")
def store_address() -> Iterator[tuple[str, int]]:
    """A store that outlives every rank, in a process of its own."""
    harness.load()
    process = harness.StoreProcess()
    yield process.address
    process.close()


@pytest.fixture
def ranks(store_address: tuple[str, int], tmp_path: Path) -> Iterator[harness.Ranks]:
    """Runs functions as ranks: see harness.Ranks."""
    made = harness.Ranks(store_address, tmp_path)
    yield made
    made.close()


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that may read each other's memory do so for small operations, too."""
    monkeypatch.setenv("FTCOMM_PULL_LIMIT", "131072")


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views and records go along chains, as they go along trees where ranks are many."""
    monkeypatch.setenv("FTCOMM_SPREAD_DEGREE", "1")


@pytest.fixture
def some_chains(request: pytest.FixtureRequest) -> None:
    """So they do in cells with 8 ranks, and in those whose kill is on the way along a tree."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("size") == 8 or str(params.get("point")).startswith("spread."):
        request.getfixturevalue("chains")


@pytest.fixture
def some_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In cells whose point is passed in windows of shared memory only, ranks share a processor, and use them."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if not str(params.get("point")).startswith(kill_table.WINDOWS):
        yield
        return
    monkeypatch.setenv("FTCOMM_STAGE_LIMIT", "0")
    with on_one_processor():
        yield


@pytest.fixture
def gpu() -> str:
    """Of tests that are about a GPU. Children may use it, the test itself may not."""
    return "cuda" if devices.has_cuda() else pytest.skip("needs a CUDA device")


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Runs the test over shared memory and over sockets."""
    return str(request.param)


def pytest_report_header() -> str:
    return "CUDA: " + (
        "tests of tensors run on the CPU and on it" if devices.has_cuda() else "none; tests run on the CPU only"
    )


@pytest.hookimpl(tryfirst=True)  # before those with the marker table are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tables.leave_samples(items)


def pytest_collection_finish() -> None:
    forked_parent.prepare()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "call":
        item.user_properties += [("kill", cell) for cell in kill_table.take_recorded()]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        for name, cell in report.user_properties:
            if name == "kill":
                kill_table.count(*cell)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a whole run of the tables each point must have been hit somewhere; a part of them proves nothing about that."""
    if hasattr(session.config, "workerinput"):  # of pytest-xdist: it sees its own part only
        return
    if _whole_tables(session.config) and session.exitstatus == 0 and kill_table.never_hit():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not kill_table.any_cells():
        return
    terminalreporter.section("kill tables")
    whole = _whole_tables(config)
    for line in kill_table.summary(whole):
        terminalreporter.write_line(line)
    if whole and kill_table.never_hit():
        terminalreporter.write_line("FAILED: no cell hits " + ", ".join(kill_table.never_hit()), red=True)


def _whole_tables(config: pytest.Config) -> bool:
    option = config.option
    return option.markexpr == "table" and not option.keyword and config.args == config.getini("testpaths")
