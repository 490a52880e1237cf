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
    (tmp_path / "own.py").write_text("if __name__ == '__main__': main()\nimport bisect\n")
    script = """
    '''What it does.'''
    from __future__ import annotations
    import time
    CLOCK = time.monotonic
    import json, numpy.linalg as la
    from cffi import FFI, api
    SIZE: int = 3 if "RANK" in os.environ else 4
    if typing.TYPE_CHECKING:
        import not_there
    def main(size=SIZE):
        import pickle
        os.environ["OMP_NUM_THREADS"] = "1"
    class Model(la.Base):
        size = 1
        def step(self): sys.path.clear()
    import csv, own
    try:
        import colorsys
    except ImportError:
        sys.exit("no colours")
    if SIZE > 3: ODD = False
    import sched
    if __name__ == "__main__":
        main()
    import base64
    """
    names = ["__future__", "time", "json", "numpy.linalg", "cffi", "csv", "bisect", "colorsys", "sched"]
    assert modules(tmp_path, script) == names
    assert leading_imports(str(tmp_path / "script.py"), module=False)[4] == ("cffi", ("FFI", "api"))


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "from os import environ as e\ne['OMP_NUM_THREADS'] = '1'",
        "os.environb[b'OMP_NUM_THREADS'] = b'1'",
        "os.environ.setdefault('OMP_NUM_THREADS', '1')",
        "os.environ |= {'OMP_NUM_THREADS': '1'}",
        "from os import environ as e\ne |= {'OMP_NUM_THREADS': '1'}",
        "del os.environ['OMP_NUM_THREADS']",
        "configure(os.environ)",
        "os.putenv('OMP_NUM_THREADS', '1')",
        "if True: os.environ['OMP_NUM_THREADS'] = '1'",
        "if flag:\n    pass\nelse:\n    import bisect",
        "try: os.environ['OMP_NUM_THREADS'] = '1'\nexcept KeyError: pass",
        "try: SIZE = sizes['x']\nexcept KeyError: import bisect",
        "for size in sizes: pass",
        "with lock: pass",
        "sys.path.insert(0, 'vendored')",
        "import sys as s\ns.path.insert(0, 'vendored')",
        "from sys import path\npath.append('vendored')",
        "from sys import path\npath += ['vendored']",
        "sys.path[:0] = ['vendored']",
        "sys.modules['numpy'] = None",
        "__path__ = ['vendored']",
        "def __getattr__(name): os.environ['OMP_NUM_THREADS'] = '1'",
        "os.sched_setaffinity(0, {0})",
        "sys.setdlopenflags(258)",
        "os.chdir('there')",
        "np.bool = bool",
        "load_dotenv()",
        "monkey.patch_all()",
        "SEED = configure()",
        "logger = logging.getLogger(__name__)",
        "(made := configure())",
        "@configure\ndef f(): pass",
        "def f(size=configure()): pass",
        "class C:\n    configure()",
        "exec(open('setup').read())",
        "from . import sibling",
        "import not_there",
        "try: import not_there\nexcept ImportError: pass",
        "import sets_the_environment",
        "from package import sets_the_environment",
        "from package import *",
    ],
)
def test_not_after_what_could_change_an_import(tmp_path: Path, statement: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("__all__ = ['sets_the_environment']\n")
    for folder in (tmp_path, tmp_path / "package"):
        (folder / "sets_the_environment.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    assert set(modules(tmp_path, f"import json\n{statement}\nimport numpy\n")) <= {"json", "os", "sys"}


def test_own_modules_are_read_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import csv\n")
    (tmp_path / "package" / "part.py").write_text("import numpy\nRUN = True\n")
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
