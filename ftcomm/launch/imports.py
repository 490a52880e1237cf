"""What a script imports before it could have changed what an import does. Nothing of the user's own is run to find out.

A standby imports these modules before there is anything to run. That must make no difference to the script: a statement
that could set an environment variable (``OMP_NUM_THREADS``) or change the module search path ends the list, and the user's own
modules are only read, for what they import and for such statements.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder

Import = tuple[str, tuple[str, ...]]  # a module, and the names that `from` takes of it: each may be a submodule

_READS = {"get", "items", "keys", "values", "copy"}  # of os.environ and its like
_CHANGES = {"putenv", "unsetenv", "exec", "eval", "addsitedir", "meta_path", "path_hooks"}


class _Ended(Exception):
    """What is imported from here on may depend on what the script has done."""


def leading_imports(target: str, module: bool) -> list[Import]:
    """Of a script file, or with ``module`` of what ``python -m target`` runs."""
    found: list[Import] = []
    reader = _Reader(os.getcwd() if module else os.path.dirname(os.path.realpath(target)))
    try:
        for file in reader.sources(target, main=True) if module else [target]:
            for one in reader.imports_of(file):
                found.append(one)  # what came before the end of the list counts
    except _Ended:
        pass
    return found


class _Reader:
    """Goes through the imports in Python's order, with the folder ``own`` in front of sys.path."""

    def __init__(self, own: str) -> None:
        self._path = [own, *sys.path]
        self._read: set[str] = set()
        paths = sysconfig.get_paths()
        folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        folders |= {*site.getsitepackages(), site.getusersitepackages()}
        self._installed = tuple(os.path.realpath(folder) + os.sep for folder in folders)

    def imports_of(self, file: str) -> Iterator[Import]:
        if file in self._read:
            return
        self._read.add(file)
        try:
            with open(file, "rb") as source:
                tree = ast.parse(source.read())
        except (OSError, ValueError, SyntaxError):
            raise _Ended from None
        for statement in tree.body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    yield from self._import(alias.name, ())
            elif isinstance(statement, ast.ImportFrom):
                if statement.level or statement.module is None:
                    raise _Ended
                yield from self._import(statement.module, tuple(a.name for a in statement.names if a.name != "*"))
            else:
                self._pass_over(statement)

    def _import(self, name: str, names: tuple[str, ...]) -> Iterator[Import]:
        if self._is_installed(name):
            yield name, names
            return
        files = self.sources(name)
        for submodule in names:
            files += self.sources(f"{name}.{submodule}", optional=True)
        for file in files:
            yield from self.imports_of(file)

    def sources(self, name: str, main: bool = False, optional: bool = False) -> list[str]:
        """The files that an import of one of the user's own modules runs. ``optional``: the last part may be no module."""
        files: list[str] = []
        spec: ModuleSpec | None = None
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            within = spec.submodule_search_locations if spec is not None else None
            spec = self._find(".".join(parts[:depth]), within) if spec is None or within is not None else None
            if spec is None:
                if optional and depth == len(parts):
                    return files
                raise _Ended
            if spec.origin is None and spec.submodule_search_locations is not None:
                continue  # a folder without __init__.py
            if spec.origin is None or not spec.origin.endswith(".py"):
                raise _Ended
            files.append(spec.origin)
        if main and spec is not None and spec.submodule_search_locations is not None:
            return files + self.sources(f"{name}.__main__")
        return files

    def _find(self, name: str, within: object) -> ModuleSpec | None:
        if within is not None:
            return PathFinder.find_spec(name, list(within))  # type: ignore[call-overload,no-any-return]
        spec = PathFinder.find_spec(name, self._path)
        if spec is None or spec.origin is None:  # perhaps a finder of an editable install knows it
            with contextlib.suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(name) or spec
        return spec

    def _is_installed(self, name: str) -> bool:
        """In Python's library or in site-packages; what an editable install points to is the user's own."""
        top = name.partition(".")[0]
        if top in ("ftcomm", "__future__") or top in sys.builtin_module_names:
            return True
        spec = self._find(top, None)
        if spec is None or spec.origin is None:
            return False
        return spec.origin in ("built-in", "frozen") or os.path.realpath(spec.origin).startswith(self._installed)

    def _pass_over(self, statement: ast.stmt) -> None:
        """Any statement but an import: ends the list if it may matter for imports that follow."""
        harmless: set[int] = set()
        for node in ast.walk(statement):  # from the outside inwards
            match node:
                case ast.Import(names=names) if not all(self._is_installed(alias.name) for alias in names):
                    raise _Ended
                case ast.ImportFrom(level=level, module=name):
                    if level or name is None or not self._is_installed(name):
                        raise _Ended
                case ast.Subscript(value=value, ctx=ast.Load()):
                    harmless.add(id(value))
                case ast.Compare(comparators=values):
                    harmless.update(map(id, values))
                case ast.Attribute(value=value, attr=attr) if attr in _READS:
                    harmless.add(id(value))
            if _can_change(node) and id(node) not in harmless:
                raise _Ended


def _can_change(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name == "environ" or name in _CHANGES:
            return True
        case ast.Attribute(value=ast.Name(id="sys"), attr="path" | "modules"):
            return True
    return False
