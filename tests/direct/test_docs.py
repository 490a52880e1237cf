"""The documents say what the code says: no option, variable, error or table is missing, no link leads nowhere."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ftcomm import errors
from ftcomm._lib import lib
from ftcomm.options import Options, environment_name

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def has_row(name: str) -> bool:
    """Some table has it in its first columns: other rows may mention it where they explain."""
    rows = (line.split("|")[1:3] for line in OPERATIONS.splitlines() if line.startswith("|"))
    return any(f"`{name}`" in cell for row in rows for cell in row)


def variables() -> set[str]:
    """Every environment variable of ours that some source names."""
    found: set[str] = set()
    for path in (ROOT / "ftcomm").rglob("*.py"):
        found.update(re.findall(r"\bFTCOMM_[A-Z_]+", path.read_text()))
    for folder in ("native", "bindings"):
        for path in (ROOT / folder).rglob("*.cc"):
            found.update(re.findall(r'"(FTCOMM_[A-Z_]+)"', path.read_text()))
    found.update(re.findall(r"(?<![\w.])(FTCOMM_[A-Z_]+)=", (ROOT / "Makefile").read_text()))
    return found


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(Options)])
def test_each_option_is_in_the_table(option: str) -> None:
    assert has_row(option)
    assert has_row(environment_name(option))


def test_each_variable_is_in_a_table() -> None:
    found = variables()
    assert {"FTCOMM_FAULTS", "FTCOMM_FLAT_LIMIT"} <= found
    assert [name for name in sorted(found) if not has_row(name)] == []


def test_each_error_is_in_the_table() -> None:
    classes = [name for name in errors.__all__ if name not in ("Error", "from_json")]
    first = "".join(line.split("|")[1] for line in OPERATIONS.splitlines() if line.startswith("|"))
    assert [name for name in classes if f"`{name}`" not in first] == []


def test_reference_and_tables_are_up_to_date() -> None:
    pytest.importorskip("torch")
    script = [sys.executable, str(ROOT / "scripts" / "make_api_docs.py"), "--check"]
    made = subprocess.run(script, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


def test_each_listed_failpoint_is_in_the_code_and_the_reverse() -> None:
    ffi, C = lib()
    listed = {point["name"] for point in json.loads(ffi.string(C.ft_fault_points()).decode())}
    used = {"step"}  # ft_fault_step
    for path in (ROOT / "native" / "src").rglob("*.cc"):
        if not path.name.startswith("failpoint"):
            for call in re.findall(r"FT_POINT\(([^;]*?)\)", path.read_text()):
                used.update(re.findall(r'"([a-z0-9._]+)"', call))
    for path in (ROOT / "ftcomm").rglob("*.py"):
        used.update(re.findall(r'(?:_failpoint\(|ft_fault_hit\(b)"([a-z0-9._]+)"', path.read_text()))
    assert used == listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
