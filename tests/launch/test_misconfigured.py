"""A worker whose job can't be made with its options: whoever came in its place would fail in the same way."""

from __future__ import annotations

import pytest
from launch.running import Start

WHY = "its job can't be made with these options"
ENDS = "import ftcomm; ftcomm.init()"
OF_OTHERS = """
import os, ftcomm
ftcomm.init(options=ftcomm.Options(heartbeat=1.0 + int(os.environ["RANK"])))
"""


@pytest.mark.parametrize("policy", ["raise", "lossy", "replay"])
@pytest.mark.sample(1)
def test_is_not_started_again(start: Start, policy: str) -> None:
    run = start(ENDS, "--nproc-per-node", "2", "--policy", policy, FTCOMM_INTERFACE="none0")
    code, _, err = run.finish()
    assert code == 1
    assert 'there is no network interface "none0"' in err
    assert WHY in err
    assert "replacement" not in err


@pytest.mark.parametrize("policy", ["lossy", "replay"])
@pytest.mark.sample(1)
def test_with_other_options_than_the_others(start: Start, policy: str) -> None:
    code, _, err = start(OF_OTHERS, "--nproc-per-node", "2", "--policy", policy).finish()
    assert code == 1
    assert "Mismatch" in err
    assert WHY in err
    assert "replacement" not in err


def test_who_tries_again_by_itself_has_a_job(start: Start) -> None:
    script = """
import os, signal, ftcomm
try:
    ftcomm.init(options=ftcomm.Options(interface="none0"))
except ftcomm.ConfigError:
    comm = ftcomm.init(job="second")
if (comm.rank, os.environ["FTCOMM_INCARNATION"]) == (1, "0"):
    raise SystemExit(3)
comm.barrier()
print("done", flush=True)
"""
    code, out, err = start(script, "--nproc-per-node", "2", "--policy", "replay").finish()
    assert (code, out) == (0, "done\n" * 2), err
    assert "replacement 1" in err
