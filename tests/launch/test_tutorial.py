"""The scripts of docs/tutorial.md, word for word but for the numbers of epochs and ranks."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("sklearn") is None:  # to import it takes two seconds
    pytest.skip("needs scikit-learn", allow_module_level=True)
from launch.running import Start

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
PLAIN, ENGINE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(start: Start, folder: Path, *flags: str) -> tuple[str, str]:
    """The weights, and what ftrun said."""
    script = ENGINE.replace("EPOCHS = 30", "EPOCHS = 2").replace('"ckpt"', repr(str(folder)))
    code, out, err = start(script, "--nproc-per-node", "2", *flags).finish()
    assert code == 0, err
    (weights,) = re.findall(r"weights (\w{16})", out)
    return weights, err


def test_the_engine_needs_five_more_lines_at_most() -> None:
    plain, engine = PLAIN.splitlines(), ENGINE.splitlines()
    both = [line.split() for line in plain], [line.split() for line in engine]  # further in is the same line
    new = sum(line.startswith("+ ") for line in difflib.ndiff(*[[" ".join(line) for line in text] for text in both]))
    gone = sum(line.startswith("- ") for line in difflib.ndiff(*[[" ".join(line) for line in text] for text in both]))
    assert new - gone <= 5
    assert "ftcomm" not in PLAIN


def test_whoever_is_killed_the_weights_are_the_same(start: Start, tmp_path: Path) -> None:
    (fault,) = re.findall(r'--faults "(.*?)"', TEXT)
    weights, _ = run(start, tmp_path / "first", "--policy", "lossy")
    fault = fault.replace("step:100", "step:20").replace("rank=2", "rank=1")
    again, said = run(start, tmp_path / "second", "--policy", "lossy", "--faults", fault)
    assert again == weights
    for line in (
        "step 20 is done again: rank 1 has no part in it",
        "step 20 begins when rank 1 will be there again",
        "replicas are equal before step 20: 16 tensors, bit for bit",
        "1 replacement, 1 step done again",
        "1 failure, 1 step (16 samples) done again, no sample lost",
    ):
        assert line in said, said
