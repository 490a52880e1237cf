"""The deterministic simulator: the library's object files, thousands of schedules, every invariant after every event."""

from __future__ import annotations

import re
import subprocess

import pytest

from ftcomm._lib import native_path


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [native_path("ftcomm-sim"), *arguments], capture_output=True, text=True, check=False, timeout=280
    )


def test_invariants_hold() -> None:
    done = simulate("--seeds", "1500", "--jobs", "2")
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"1500 seeds in .* 0 violations", done.stdout), done.stdout[-2000:]


# Found beyond the first 10,000, mended since: a recorded failure that the next decision forgot; a communicator whose members were
# all replaced, and of whom some took over what an admission before had said of it.
@pytest.mark.parametrize("seed", [14794, 17932, 24393, 13747, 31254])
def test_seed_that_once_hung(seed: int) -> None:
    done = simulate("--seed", str(seed))
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_seed_replays_exactly() -> None:
    first, second = (simulate("--seed", "11", "--trace").stdout for _ in range(2))
    assert len(first) > 10_000
    assert first == second


def test_every_missing_rule_is_caught() -> None:
    """Each row of the table: the rule, after how many seeds the protocol without it broke, and which invariant."""
    done = simulate("--mutations", "--seeds", "4000", "--jobs", "2")
    assert done.returncode == 0, done.stdout
    rows = [line for line in done.stdout.splitlines() if re.match(r"\| [CML]\d+ ", line)]
    assert {row.split()[1] for row in rows} >= {"L1", "L2", "L3", "L4", "L5", "L6", "L7"}  # L8 to L10 are about files
    assert len(rows) == 32
    assert all(re.match(r"\| [CML]\d+ [^|]+\| \d+ \| [A-Z]+\d* \|", row) for row in rows), done.stdout


def test_a_missing_rule_is_reported() -> None:
    done = simulate("--seeds", "500", "--jobs", "2", "--mutate", "C1", "--stop-at-first")
    assert done.returncode == 1, done.stdout[-2000:]
    assert "VIOLATION" in done.stdout


def test_a_rule_that_is_not_caught_fails_the_table() -> None:
    done = simulate("--mutations", "--seeds", "1")
    assert done.returncode == 1
    assert "not caught in 1" in done.stdout
