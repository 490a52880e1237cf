"""Scripts that know nothing of ftcomm run as with torchrun; several nodes share one job."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch.running import Start
from ports import free_port

GLOO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(t)
said = [int(t[0])] + [os.environ[name] for name in ("LOCAL_RANK", "FTCOMM_JOB", "FTCOMM_SECRET")]
os.write(1, (" ".join(map(str, said)) + "\\n").encode())
dist.destroy_process_group()
"""


def test_gloo_runs_as_with_torchrun(start: Start) -> None:
    run = start(GLOO, "--nproc-per-node", "2")
    code, out, err = run.finish()
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines] == ["3"] * 2
    assert sorted(line[1] for line in lines) == ["0", "1"]


def test_logs_of_both_incarnations_are_kept(start: Start, tmp_path: Path) -> None:
    run = start(
        """
        import os, sys
        print("incarnation", os.environ["FTCOMM_INCARNATION"])
        sys.exit(os.environ["FTCOMM_INCARNATION"] == "0")
        """,
        "--redirects",
        "3",
        "--log-dir",
        str(tmp_path / "logs"),
    )
    code, out, err = run.finish()
    assert (code, out) == (0, ""), err
    (log,) = (tmp_path / "logs").glob("**/stdout.log")
    assert log.read_text() == "incarnation 0\nincarnation 1\n"


@pytest.mark.table
def test_two_nodes_are_one_job(start: Start) -> None:
    port = free_port()
    flags = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "two",
        "--rdzv-endpoint",
        f"localhost:{port}",
    )
    nodes = [start(GLOO, *flags), start(GLOO, *flags)]
    lines = []
    for node in nodes:
        code, out, err = node.finish()
        assert code == 0, err
        lines += [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines] == ["10"] * 4
    assert len({tuple(line[2:]) for line in lines}) == 1


def test_a_worker_of_one_node_is_replaced_there(start: Start) -> None:
    port = free_port()
    flags = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "two",
        "--rdzv-endpoint",
        f"localhost:{port}",
    )
    script = """
    import os, sys
    print(os.environ["RANK"], os.environ["FTCOMM_INCARNATION"])
    sys.exit(os.environ["RANK"] == "1" and os.environ["FTCOMM_INCARNATION"] == "0")
    """
    outputs = []
    for node in [start(script, *flags), start(script, *flags)]:
        code, out, err = node.finish()
        assert code == 0, err
        outputs.append(out)
    assert sorted(outputs) == ["0 0\n", "1 0\n1 1\n"]
