"""Options and their environment variables."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import ftcomm
from ftcomm.options import environment_name


def test_defaults() -> None:
    options = ftcomm.Options()
    assert (options.policy, options.heartbeat, options.timeout) == ("raise", 1.0, None)
    assert (options.transport, options.authority, options.log) == ("auto", "auto", "all")
    assert options.log_limit == 4 << 30
    assert options.operation_timeout == 1800.0


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ftcomm.Options().policy = "lossy"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("policy", "lossy", "lossy"),
        ("heartbeat", "0.25", 0.25),
        ("timeout", "90", 90.0),
        ("transport", "tcp", "tcp"),
        ("interface", "eth0", "eth0"),
        ("host", "a", "a"),
        ("authority", "store", "store"),
        ("secret", "s" * 16, "s" * 16),
        ("log_dir", "/x", "/x"),
        ("log_limit", "1.5GiB", 3 << 29),
        ("durability", "host", "host"),
        ("events", "/run", "/run"),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(environment_name(name), text)
    assert getattr(ftcomm.Options(), name) == value


def test_every_field_has_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in dataclasses.fields(ftcomm.Options):
        monkeypatch.setenv(environment_name(field.name), "!" * 16)
        try:
            seen = getattr(ftcomm.Options(), field.name)
        except ftcomm.ConfigError as error:
            seen = str(error)
        assert "!" in seen, field.name
        monkeypatch.delenv(environment_name(field.name))


def test_an_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOMM_HEARTBEAT", "3")
    assert ftcomm.Options(heartbeat=2.0).heartbeat == 2.0
    monkeypatch.setenv("FTCOMM_HEARTBEAT", "nonsense")
    assert ftcomm.Options(heartbeat=2.0).heartbeat == 2.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"policy": "ignore"}, "raise, lossy, replay"),
        ({"log": "inter-host"}, "policy 'replay' logs"),
        ({"log": "off", "policy": "replay"}, "neither all"),
        ({"log": [[0, 1], [1, 2]], "policy": "replay"}, "two groups"),
        ({"log": "0,x", "policy": "replay"}, "neither all"),
        ({"heartbeat": 0}, "at least 0.01"),
        ({"heartbeat": "1"}, "number of seconds"),
        ({"heartbeat": float("nan")}, "number of seconds"),
        ({"timeout": -1}, "positive"),
        ({"timeout": 0.5}, "shorter than heartbeat"),
        ({"transport": "ib"}, "auto, shm, tcp"),
        ({"authority": "paxos"}, "auto, shm, store"),
        ({"authority": "etcd://a:1"}, "etcd is not built in"),
        ({"secret": "short"}, "at least 16"),
        ({"log_limit": 0}, "positive"),
        ({"durability": "disk"}, "process, host"),
    ],
)
def test_wrong_values(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ftcomm.ConfigError, match=says):
        ftcomm.Options(**fields)


@pytest.mark.parametrize(("name", "text"), [("heartbeat", "soon"), ("log_limit", "4 apples"), ("timeout", "1m")])
def test_wrong_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(environment_name(name), text)
    with pytest.raises(ftcomm.ConfigError, match=environment_name(name)):
        ftcomm.Options()


def test_the_secret_is_not_shown() -> None:
    assert "hunter2" not in repr(ftcomm.Options(secret="hunter2" * 4))


@pytest.mark.parametrize("given", ["0,1/2,3", "[[0, 1], [2, 3]]", [[0, 1], [2, 3]], ((0, 1), (2, 3))])
def test_log_groups_may_be_written_in_several_ways(given: Any) -> None:
    options = ftcomm.Options(policy="replay", log=given)
    assert options.log == ((0, 1), (2, 3))
    assert options.log_scope == "0,1/2,3"
    assert dataclasses.replace(options, heartbeat=2.0).log == options.log
