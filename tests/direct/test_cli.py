"""The command ftcomm, and what torch calls on import."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ftcomm
from ftcomm._lib import native_path
from ftcomm.cli import main


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "version").strip() == ftcomm.__version__


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, "info", "--json"))
    assert facts["version"] == ftcomm.__version__
    assert set(facts["transports"]) == {"shm", "tcp"}
    assert {"cpu_features", "pidfd_open", "futex_waitv", "memfd_create"} <= set(facts["host"])
    assert "pidfd open" in output(capsys, "info")
    assert "torch" in output(capsys, "info")


def test_info_of_another_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "libftcomm.so"
    other.symlink_to(native_path("libftcomm.so"))
    monkeypatch.setenv("FTCOMM_LIBRARY", str(other))
    facts = json.loads(output(capsys, "info", "--json"))
    assert facts["library"] == str(other)
    assert facts["fault_tolerance"] == "yes"


def test_faults(capsys: pytest.CaptureFixture[str]) -> None:
    points = json.loads(output(capsys, "faults", "--json"))
    assert len(points) >= 25
    text = output(capsys, "faults")
    for point in points:
        assert point["name"] in text
        assert point["where"]


def test_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "clean")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    ["faults", "faults --json", "info", "version", "--help", "sim --seeds 3", "tune --ranks 2 --sizes 4K --rounds 1"],
)
def test_it_ends_quietly_when_nobody_reads_its_output(arguments: str, unbuffered: str) -> None:
    """As before ``| head``, which goes when it has enough."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "ftcomm.cli", *arguments.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(writer)
    assert not done.stderr
    if (arguments, unbuffered) != ("--help", "1"):  # argparse takes the error itself
        assert done.returncode in (141, -signal.SIGPIPE)


def test_wrong_command() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["dance"])
    assert caught.value.code == 2


def test_installed_commands() -> None:
    folder = Path(sys.executable).parent
    for command in ("ftcomm", "ftrun"):
        assert subprocess.run([folder / command, "--help"], capture_output=True, check=False).returncode == 0


def test_simulator_is_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ftcomm.cli", "sim", "--seeds", "1"], capture_output=True, text=True, check=False
    )
    assert "seeds/s" in done.stdout, done.stderr  # what it finds is the simulator's own test


def test_the_header_is_what_is_bound() -> None:
    """Every function of the header is in the library (ABI mode would only notice at the first call)."""
    from ftcomm._lib import lib

    ffi, C = lib()
    names = re.findall(r"^FT_API\b[^;(]*?\b(ft_\w+)\(", Path(native_path("ftcomm.h")).read_text(), re.MULTILINE)
    assert len(names) > 40
    for name in names:
        assert ffi.cast("void*", getattr(C, name))


def test_importing_torch_survives_a_broken_backend() -> None:
    code = """
import sys, warnings
sys.modules["ftcomm.torch.register"] = None
from ftcomm._torch_entry import register
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    register()
print(len(seen), "ftcomm" in str(seen[0].message))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1 True", done.stderr
