"""Workers' events that are lost are not taken for what did not happen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launch.running import Start


@pytest.mark.parametrize("policy", ["raise", "replay"])
def test_on_a_full_disk_no_replacement_is_ended(start: Start, tmp_path: Path, policy: str) -> None:
    """It has come in, but what tells so is lost: with a limit on files, which the kernel keeps to as to the end of a disk."""
    for name in ("end", "go"):
        os.mkfifo(tmp_path / name)
    run = start(
        """
        import json, os, resource, time
        rank, incarnation = int(os.environ["RANK"]), int(os.environ["FTCOMM_INCARNATION"])
        def event(name, **fields):
            with open(f"{os.environ['FTCOMM_EVENTS']}/events-{rank}-{incarnation}.jsonl", "a") as file:
                file.write(json.dumps({"time": time.time(), "rank": rank, "incarnation": incarnation, "event": name, **fields}))
                file.write("\\n")
        def limit(pid, size=None):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))
        if rank == 0:
            open(f"{os.environ['WORK']}/end").read()
        elif incarnation == 0:
            event("step")
            limit(os.getppid(), 0)
            os._exit(1)
        else:
            for pid in (os.getpid(), os.getppid()): limit(pid)
            open(f"{os.environ['WORK']}/end", "w").close()
            ftrun = f"{os.environ['FTCOMM_EVENTS']}/ftrun-0.jsonl"
            while '"exit", "source": "ftrun", "rank": 0' not in open(ftrun).read(): pass
            event("fault", at="here", do="delay")
            open(f"{os.environ['WORK']}/go").read()
        """,
        *("--nproc-per-node", "2", "--policy", policy),
    )
    said = run.hear("rank 1: fault at here")
    (tmp_path / "go").write_text("")
    code, _, err = run.finish()
    assert code == 0, err
    assert "start again out of their logs" not in "".join(said) + err, (said, err)
