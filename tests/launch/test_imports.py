"""Which imports of a script a standby may do before it: none that the script could have changed."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from ftcomm.launch.imports import leading_imports


def modules(folder: Path, script: str) -> list[str]:
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    return [name for name, _ in leading_imports(str(file), module=False)]


def test_up_to_the_end_of_the_script(tmp_path: Path) -> None:
    script = """
    '''What it does.'''
    from __future__ import annotations
    import time
    BEGAN = time.monotonic()
    import json, numpy.linalg as la
    from cffi import FFI, api
    RANK = int(os.environ["RANK"]) if "RANK" in os.environ else os.environ.get("SLURM_PROCID")
    def main():
        import pickle
    import csv
    """
    assert modules(tmp_path, script) == ["__future__", "time", "json", "numpy.linalg", "cffi", "csv"]
    assert leading_imports(str(tmp_path / "script.py"), module=False)[4] == ("cffi", ("FFI", "api"))


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "os.environ.setdefault('OMP_NUM_THREADS', '1')",
        "os.environ |= {'OMP_NUM_THREADS': '1'}",
        "del os.environ['OMP_NUM_THREADS']",
        "configure(os.environ)",
        "os.putenv('OMP_NUM_THREADS', '1')",
        "if True: os.environ['OMP_NUM_THREADS'] = '1'",
        "def set_up():\n        environ.update(OMP_NUM_THREADS='1')",
        "sys.path.insert(0, 'vendored')",
        "sys.modules['numpy'] = None",
        "exec(open('setup').read())",
        "from . import sibling",
        "import not_there",
        "try:\n        import own\n    except ImportError: pass",
        "import sets_the_environment",
        "from package import sets_the_environment",
    ],
)
def test_not_after_what_could_change_an_import(tmp_path: Path, statement: str) -> None:
    (tmp_path / "own.py").write_text("")
    (tmp_path / "package").mkdir()
    for folder in (tmp_path, tmp_path / "package"):
        (folder / "sets_the_environment.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    found = modules(tmp_path, f"import json\n    {statement}\n    import numpy\n".replace("\n    ", "\n"))
    assert found in (["json"], ["json", "os"])


def test_own_modules_are_read_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import csv\n")
    (tmp_path / "package" / "part.py").write_text("import numpy\nprint('run')\n")
    (tmp_path / "json.py").write_text("import base64\n")  # in place of Python's own
    script = "from package import part, something\nimport package.part\nimport json\nimport bisect\n"
    assert modules(tmp_path, script) == ["csv", "numpy", "base64", "bisect"]
    assert not {"package", "package.part"} & set(sys.modules)


def test_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").mkdir()
    for name, text in (("__init__", "import csv"), ("__main__", "import numpy"), ("other", "import bisect")):
        (tmp_path / "tool" / f"{name}.py").write_text(text)
    assert leading_imports("tool", module=True) == [("csv", ()), ("numpy", ())]
    assert leading_imports("tool.other", module=True) == [("csv", ()), ("bisect", ())]
    assert leading_imports("not_there", module=True) == []


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    assert modules(tmp_path, "import json\nthis is no Python\n") == []
    assert leading_imports(str(tmp_path / "missing.py"), module=False) == []
