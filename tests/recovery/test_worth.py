"""Whether logging is worth it: each rule by itself, the figures, wrong numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

import ftcomm
from ftcomm.recovery import activation_bytes, bubble_ratio, worth_logging

# 100 MB per iteration, copied in 10 ms; 200 ms of bubbles in a second.
GIVEN: dict[str, Any] = {
    "log_bytes": 1e8,
    "model_bytes": 1e10,
    "copy_bandwidth": 1e10,
    "bubble_seconds": 0.2,
    "iteration_seconds": 1.0,
    "checkpoint_interval": 100,
    "store_bandwidth": 1e9,
}


def test_worth_it() -> None:
    found = worth_logging(**GIVEN)
    assert found
    assert found.worth
    assert found.against == ()
    assert found.reason == (
        "Worth it: copying takes 10 ms of 200 ms of bubbles per iteration, and recovery 50 s instead of 60 s."
    )
    assert found.copy_seconds == pytest.approx(0.01)
    assert found.log_to_model == pytest.approx(0.01)
    assert found.interval_bytes == pytest.approx(1e10)
    assert found.writing_rate == pytest.approx(1e8)
    assert found.logged_recovery == pytest.approx(10 + 50 * 0.8)
    assert found.plain_recovery == pytest.approx(10 + 50)


# What just passes and what just does not, for each rule alone.
@pytest.mark.parametrize(
    ("rule", "passes", "fails", "says"),
    [
        (
            "bubble",
            {"copy_bandwidth": 5e8},
            {"copy_bandwidth": 4.9e8},
            "copying 100 MB .* the bubbles have only 200 ms",
        ),
        ("model", {"model_bytes": 1e7}, {"model_bytes": 9.9e6}, "10.1 times the model state of 9.9 MB"),
        ("model", {"model_factor": 0.01}, {"model_factor": 0.0099}, "checkpoint more often"),
        ("storage", {"log_limit": 1e10}, {"log_limit": 9.99e9}, "a checkpoint every 99 iterations or log fewer"),
        ("storage", {"log_limit": 1e10}, {"log_limit": 9e7}, r"log_limit=90 MB: log fewer boundaries"),
        ("writing", {"write_bandwidth": 1e8}, {"write_bandwidth": 9.9e7}, "grows by 100 MB per second"),
        (
            "recovery",
            {"replay_seconds": 0.99},
            {"replay_seconds": 1.0},
            "replaying an iteration takes 1 s, training it 1 s",
        ),
        ("recovery", {"replay_bytes": 9.9e8}, {"replay_bytes": 1e9}, "reading its log from the global store takes 1 s"),
        ("recovery", {"store_bandwidth": 1.1e8}, {"store_bandwidth": 1e8}, "reading its log"),
    ],
)
def test_each_rule(rule: str, passes: dict[str, float], fails: dict[str, float], says: str) -> None:
    assert worth_logging(**{**GIVEN, **passes})
    found = worth_logging(**{**GIVEN, **fails})
    assert not found
    assert found.against == (rule,)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(found.reason)


def test_all_that_speaks_against_it_is_said() -> None:
    found = worth_logging(
        **{**GIVEN, "bubble_seconds": 0.0, "log_limit": 0, "write_bandwidth": 1.0, "model_bytes": 1.0}
    )
    assert found.against == ("bubble", "model", "storage", "writing", "recovery")
    assert found.reason.startswith("Not worth it: ")
    assert found.reason.count(";") == 4


def test_replay_is_the_iteration_without_its_bubbles() -> None:
    slow = worth_logging(**{**GIVEN, "bubble_seconds": 0.1})
    assert slow.logged_recovery == pytest.approx(10 + 50 * 0.9)
    read = worth_logging(**GIVEN, replay_seconds=0.05)  # now the store is slower: 100 MB take 0.1 s
    assert read.logged_recovery == pytest.approx(10 + 50 * 0.1)


def test_nothing_sent_nothing_logged() -> None:
    assert worth_logging(**{**GIVEN, "log_bytes": 0, "log_limit": 0})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"log_bytes": -1}, "log_bytes=-1 must be zero or a positive number of bytes"),
        ({"replay_bytes": math.nan}, "replay_bytes=nan"),
        ({"model_bytes": 0}, "model_bytes=0 must be a positive number of bytes"),
        ({"copy_bandwidth": 0}, "copy_bandwidth=0 .* bytes per second"),
        ({"store_bandwidth": -1}, "store_bandwidth=-1"),
        ({"write_bandwidth": "fast"}, "write_bandwidth='fast'"),
        ({"bubble_seconds": math.inf}, "bubble_seconds=inf"),
        ({"iteration_seconds": 0}, "iteration_seconds=0 must be a positive number of seconds"),
        ({"checkpoint_interval": 2.5}, "checkpoint_interval=2.5 must be a whole number"),
        ({"replay_seconds": -0.1}, "replay_seconds=-0.1"),
        ({"log_limit": -5}, "log_limit=-5"),
        ({"model_factor": 0}, "model_factor=0"),
    ],
)
def test_wrong_input(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ftcomm.ConfigError, match=says):
        worth_logging(**{**GIVEN, **changed})


def test_sizes_of_a_transformer() -> None:
    assert activation_bytes(2, 1024, 128) == 2 * 2 * 1024 * 128 * 4
    assert activation_bytes(2, 1024, 128, micro_batches=4, element_bytes=2) == 2 * 4 * 2 * 1024 * 128 * 2
    with pytest.raises(ftcomm.ConfigError, match="hidden_size=0 must be a whole number of hidden size"):
        activation_bytes(2, 0, 128)


def test_swift_figures() -> None:
    """Bytes per iteration in SWIFT's table 3, from models and batches of its table 2: 15 or 7 boundaries, hidden size 1024."""
    assert 15 * activation_bytes(512 // 4, 1024, 128, micro_batches=4) == pytest.approx(8.05e9, rel=0.01)
    assert 7 * activation_bytes(512 // 4, 1024, 128, micro_batches=4) == pytest.approx(3.76e9, rel=0.01)
    assert 15 * activation_bytes(4096 // 16, 1024, 49, micro_batches=16) == pytest.approx(24.66e9, rel=0.01)
    assert 7 * activation_bytes(4096 // 16, 1024, 49, micro_batches=16) == pytest.approx(11.51e9, rel=0.01)
    assert bubble_ratio(4, 4) == pytest.approx(3 / 7)  # figure 1a
    assert bubble_ratio(1, 4) == 0
    with pytest.raises(ftcomm.ConfigError, match="micro_batches=0"):
        bubble_ratio(4, 0)
