"""The engine under torchrun, which ends all workers when one dies, and then starts all again or none."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import forked
from launch.running import PATIENCE, clean_environment
from ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
REASON = "strategy replication: every rank holds the whole state, and the launcher ends all when one dies"

# The example as it is, but for the fault: torchrun has no number for a worker's replacement, so it would be killed again.
ONCE = f"""
import os, runpy, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.environ["FTCOMM_FAULTS"] = os.environ.get("FAULTS", "")
sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_path(os.path.join({str(EXAMPLES)!r}, os.environ["EXAMPLE"]), run_name="__main__")
"""


def start(flags: list[str], **environment: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forked.popen(flags, clean_environment(**environment), launcher=forked.TORCHRUN, workers=True, **pipes)


class Torchrun:
    """``run(restarts, *script_flags)`` -> exit code, what workers printed, what was said on stderr."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._script.write_text(ONCE)

    def __call__(
        self,
        restarts: int,
        *script_flags: str,
        faults: str = "",
        example: str = "train_engine.py",
        policy: str = "lossy",
        workers: int = 4,
    ) -> tuple[int, str, str]:
        process = start(
            [
                *("--standalone", "--nproc-per-node", str(workers)),
                *("--max-restarts", str(restarts), str(self._script), "--epochs", "1", *script_flags),
            ],
            FTCOMM_POLICY=policy,
            FAULTS=faults,
            EXAMPLE=example,
        )
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # its workers with it
            out, err = process.communicate()
            pytest.fail(f"torchrun hangs.\n{out}\n{err}")
        return process.returncode, out, err


@pytest.fixture
def torchrun(tmp_path: Path) -> Torchrun:
    return Torchrun(tmp_path / "script.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The last line, by the flags of the script and the number of workers."""
    run = Torchrun(tmp_path_factory.mktemp("undisturbed") / "script.py")

    @functools.cache
    def last_line(flags: str, workers: int = 4) -> str:
        code, out, err = run(0, *flags.split(), workers=workers)
        assert code == 0, err
        return out.splitlines()[-1]

    return last_line


@pytest.mark.parametrize(
    ("faults", "flags", "workers"),
    [
        ("rank=0,at=collective.part,step=10,do=kill", "", 3),
        *(pytest.param("rank=2,at=step:10,do=kill", flags, 4, marks=pytest.mark.table) for flags in ("", "--hsdp")),
    ],
)
def test_all_go_on_from_the_last_whole_step(
    torchrun: Torchrun, tmp_path: Path, undisturbed: Callable[..., str], faults: str, flags: str, workers: int
) -> None:
    where = ("--checkpoints", str(tmp_path / "c"))
    code, out, err = torchrun(1, *where, *flags.split(), faults=faults, workers=workers)
    assert code == 0, err
    assert "strategy replication" in err
    (left,) = re.findall(r"SIGTERM: all leave before step (\d+); its state is in a checkpoint", err)
    assert f"goes on from the checkpoint of step {left}" in err
    assert out.splitlines()[-1] == undisturbed(flags, workers)


@pytest.mark.table
def test_without_restarts_the_next_start_goes_on(
    torchrun: Torchrun, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    """The survivors train no step without the dead rank in the time that torchrun takes to end them."""
    where = ("--checkpoints", str(tmp_path / "c"))
    code, _, err = torchrun(0, *where, faults="rank=2,at=step:10,do=kill")
    assert code == 1, err
    assert REASON in err
    assert "SIGTERM: all leave before step 10; its state is in a checkpoint" in err
    code, out, err = torchrun(0, *where)
    assert code == 0, err
    assert "goes on from the checkpoint of step 10" in err
    assert out.splitlines()[-1] == undisturbed("")


@pytest.mark.table
def test_without_checkpoints_all_begin_anew(torchrun: Torchrun, undisturbed: Callable[..., str]) -> None:
    code, out, err = torchrun(1, faults="rank=2,at=step:10,do=kill")
    assert code == 0, err
    assert "strategy rollback: the launcher ends all when one dies" in err
    assert "as there is no checkpoint_dir nothing is kept" in err
    assert out.count("step     0 ") == 2
    assert out.splitlines()[-1] == undisturbed("")


@pytest.mark.table
@pytest.mark.parametrize(("policy", "copies"), [("raise", "1"), ("lossy", "2")])
def test_stages_go_on_from_the_newest_checkpoint_that_all_have(
    torchrun: Torchrun, tmp_path: Path, policy: str, copies: str
) -> None:
    flags = ("--samples", "160", "--epochs", "1", "--every", "2", "--copies", copies)
    pipeline = {"example": "pipeline_engine.py", "policy": policy}
    code, out, err = torchrun(1, *flags, "--checkpoints", str(tmp_path / "a"), **pipeline)
    assert code == 0, err
    assert "strategy checkpoint: the stages of a pipeline all end when one dies" in err
    faults = "rank=2,at=step:3,do=kill"
    code, disturbed, err = torchrun(1, *flags, "--checkpoints", str(tmp_path / "b"), faults=faults, **pipeline)
    assert code == 0, err
    assert "goes on from the checkpoint of step 2" in err
    assert disturbed.splitlines()[-1] == out.splitlines()[-1]


@pytest.mark.table
def test_two_nodes_need_one_restart(tmp_path: Path, undisturbed: Callable[..., str]) -> None:
    """Each node counts its own restarts, and the one without a dead worker has none."""
    script, dead = tmp_path / "script.py", tmp_path / "has-died"
    first = (
        f"""not os.path.exists({str(dead)!r}) and (os.environ["RANK"] != "2" or not open({str(dead)!r}, "w").close())"""
    )
    script.write_text(ONCE.replace('os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"', first))
    port = free_port()
    nodes = [
        start(
            [
                *("--nnodes", "2", "--nproc-per-node", "2"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-nodes"),
                *("--max-restarts", "1", str(script), "--epochs", "1", "--checkpoints", str(tmp_path / "c")),
            ],
            FTCOMM_POLICY="lossy",
            EXAMPLE="train_engine.py",
            FAULTS="rank=2,at=step:10,do=kill",
        )
        for _ in range(2)
    ]
    ended = [node.communicate(timeout=PATIENCE) for node in nodes]
    out, err = ("".join(said[which] for said in ended) for which in (0, 1))
    assert [node.returncode for node in nodes] == [0, 0], err
    assert "SIGTERM: all leave before step 10; its state is in a checkpoint" in err
    assert "goes on from the checkpoint of step 10" in err
    assert [line for line in out.splitlines() if "weights" in line] == [undisturbed("")]
