"""Wrong flags are told once, by ftrun, before anything is started."""

from __future__ import annotations

import errno
import os
import socket

import pytest
from launch.running import Start

from ftcomm.launch import cli


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--policy", "wrong"), "policy='wrong' is not one of raise, lossy"),
        (("--heartbeat", "soon"), "FTCOMM_HEARTBEAT='soon' is not valid"),
        (("--standby", "-1"), "--standby='-1' is not valid: give a number of processes for each node"),
        (("--standby", "some"), "--standby='some' is not valid"),
        (("--standby", "1", "--no-python"), "--no-python starts none"),
        (("--standby", "1", "--numa-binding", "node"), "--standby can't be with --numa-binding"),
        (("--standby", "1", "--virtual-local-rank"), "--standby can't be with --virtual-local-rank"),
        (("--nproc-per-node", "two"), "Unsupported nproc_per_node value: two"),
        (("--nnodes", "a"), "'a'"),
        (("--nnodes", "2:1"), "min_nodes=2, max_nodes=1"),
        (("--nnodes", "1:2:3"), "1:2:3"),
        (("--signals-to-handle", "SIGTERM,SIGKILL"), "--signals-to-handle: SIGKILL can't be handled"),
        (("--signals-to-handle", "SIGCHLD"), "--signals-to-handle: SIGCHLD can't be handled"),
        (("--rdzv-id", "me/run"), "--rdzv-id 'me/run' can't have a slash"),
        (("--tee", "9"), "9 does not match"),
        (("--max-restarts", "-1"), "max_restarts must be >= 0"),
        (("--log-dir", "/proc/none"), "/proc/none"),
        (("--no-python", "--", "no-such-program"), "there is no program 'no-such-program' (--no-python)"),
        (("--faults", "rank=1,at=ring.rs.hopp,do=kill"), "near it: ring.rs.hop"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_flag(start: Start, flags: tuple[str, ...], words: str) -> None:
    code, _, err = start("raise SystemExit('started')", "--nproc-per-node", "2", *flags).finish()
    assert code == 2
    assert words in err
    assert "started" not in err


def test_wrong_variable(start: Start) -> None:
    code, _, err = start("raise SystemExit('started')", FTCOMM_STANDBY="1.5").finish()
    assert code == 2
    assert "FTCOMM_STANDBY='1.5' is not valid" in err
    assert "started" not in err


def test_an_empty_variable_of_torchruns_is_none(start: Start) -> None:
    code, out, err = start("print('started')", PET_MAX_RESTARTS="").finish()
    assert (code, out) == (0, "started\n"), err


def test_an_id_that_can_be_no_jobs_name(start: Start) -> None:
    own = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "my run" + 200 * "x")
    run = start("from ftcomm.rendezvous import job_name; print(job_name())", *own)
    code, out, err = run.finish()
    assert code == 0, err
    assert out.startswith("my_runxx")
    assert len(out.strip()) == 199


def test_too_few_open_files_are_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where they end depends on how many were open before."""

    def run(args: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cli.torchrun, "run", run)
    assert cli.main(["none.py"]) == 1
    assert "raise the limit (ulimit -n)" in capfd.readouterr().err


def test_a_taken_port_is_told_in_a_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = start("raise SystemExit('started')", "--master-port", port).finish()
    assert code == 1
    assert f"address already in use (--master-addr 127.0.0.1 --master-port {port})" in err
    assert "Traceback" not in err
    assert "started" not in err
