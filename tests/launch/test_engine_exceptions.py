"""An exception that ends one rank is a death: with ``replication`` nobody trains a step without it."""

from __future__ import annotations

import pytest
from launch.running import Start
from launch.test_preemption import script, steps_of

FLAGS = ("--nproc-per-node", "2", "--policy", "lossy")


@pytest.mark.table
def test_the_bits_of_an_undisturbed_run(start: Start) -> None:
    failing = """
def before(step):
    if rank == 1 and not again and step == 10:
        raise ValueError
    if rank == 0 and not again and step == 20:
        raise SystemExit(3)
"""
    wanted = start(script(), *FLAGS, FOLDER="")
    run = start(script(failing), *FLAGS, FOLDER="")
    code, undisturbed, err = wanted.finish()
    assert code == 0, err
    code, out, err = run.finish()
    assert code == 0, err
    assert err.count("replacement 1 started") == 2, err
    assert steps_of(out) == steps_of(undisturbed)
    assert out.splitlines()[-1] == undisturbed.splitlines()[-1]
