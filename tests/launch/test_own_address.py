"""On a host whose own name nothing resolves: ftrun gives an address instead of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch.running import PATIENCE, clean_environment
from ports import free_port

NAME = "nobody-knows-this-host.invalid"
FTRUN = f"import socket, sys; socket.sethostname({NAME!r}); from ftcomm.launch.cli import main; sys.exit(main())"
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("ftcomm")
x = torch.ones(2)
dist.all_reduce(x)
print(int(x[0]), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    if subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to give a process another host name")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def ftrun(script: str, *flags: str) -> subprocess.Popen[str]:
    command = ["unshare", "--uts", sys.executable, "-c", FTRUN, *flags, script]
    return subprocess.Popen(command, env=clean_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ends_well(*runs: subprocess.Popen[str]) -> list[str]:
    """What their workers printed. All are ended, however."""
    try:
        said = [run.communicate(timeout=PATIENCE) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0] * len(runs), said
    return [out.split()[0] for out, _ in said]


@pytest.mark.table
def test_one_node(script: str) -> None:
    assert ends_well(ftrun(script, "--nproc-per-node", "1")) == ["1"]


@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.table)])
def test_two_nodes(script: str, backend: str) -> None:
    port = str(free_port())
    meet = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "7"],
        "static": ["--master-addr", "127.0.0.1", "--master-port", port],
    }[backend]
    flags = [*meet, "--nnodes", "2", "--nproc-per-node", "1"]
    assert ends_well(*(ftrun(script, *flags, "--node-rank", str(node)) for node in range(2))) == ["2", "2"]
