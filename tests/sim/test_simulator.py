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


def test_a_seed_replays_exactly() -> None:
    first, second = (simulate("--seed", "11", "--trace").stdout for _ in range(2))
    assert len(first) > 10_000
    assert first == second


# Rules whose absence shows within few seeds; `ftcomm sim --mutations` has all of them.
@pytest.mark.parametrize("rule", ["C1", "C2", "C3", "C4", "C5", "C6", "C7", "M1", "M4", "M8", "M10", "M11", "M13"])
def test_a_missing_rule_is_caught(rule: str) -> None:
    done = simulate("--seeds", "2000", "--jobs", "2", "--mutate", rule, "--stop-at-first")
    assert done.returncode == 1, done.stdout[-2000:]
    assert "VIOLATION" in done.stdout
