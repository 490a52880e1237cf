"""The scripts of docs/quickstart.md, word for word but for the number of steps."""

from __future__ import annotations

import re
from pathlib import Path

from launch.running import Start

TEXT = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
TRAIN, SUM = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_training_goes_on_after_a_kill(start: Start) -> None:
    script, changed = re.subn(r"^STEPS = \d+$", "STEPS = 60", TRAIN, flags=re.MULTILINE)
    assert changed == 1
    fault, _ = re.findall(r'--faults "(.*?)"', TEXT)  # the other one is an example's
    # Without a replacement, which would need longer to start than these few steps take.
    run = start(script, "--nproc-per-node", "4", "--policy", "lossy", "--max-restarts", "0", "--faults", fault)
    code, out, err = run.finish()
    assert code == 1, err
    assert "repaired: contributors 3 of 4" in err
    weights = dict(re.findall(r"rank (\d): sum of all weights (-?\d+\.\d{6})", out))
    assert sorted(weights) == ["0", "1", "3"], err
    assert len(set(weights.values())) == 1


def test_shrink_without_torch(start: Start) -> None:
    code, out, err = start(SUM, "--nproc-per-node", "3", "--max-restarts", "0").finish()
    assert code == 1, err
    # Not line by line: an unbuffered print writes its text and its newline apart, and the ranks share the pipe.
    for rank in 0, 2:
        # Whichever of the two proofs is looked at first.
        assert re.search(rf"rank {rank}: ranks \(1,\) died, known by \('(robust-futex|pidfd)',\), epoch 2", out), out
    for rank in 0, 1:
        assert f"rank {rank} of 2: average 2.000" in out
