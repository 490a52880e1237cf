"""What a script imports before it could have changed what an import does. Nothing of the user's own is run to find out.

A standby imports these modules before there is anything to run. That must make no difference to the script, so the list ends at
the first statement that does more than import, define, or give a name to what takes no call. The user's own modules are only
read, for what they import and for such statements.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder

Import = tuple[str, tuple[str, ...]]  # a module, and the names that `from` takes of it: each may be a submodule

# What a module may be told by a name that Python looks at itself. (`__path__` changes what is imported.)
_PLAIN_DUNDERS = {"__all__", "__author__", "__version__"}


class _Ended(Exception):
    """What is imported from here on may depend on what the script has done."""


def leading_imports(target: str, module: bool) -> list[Import]:
    """Of a script file, or with ``module`` of what ``python -m target`` runs."""
    found: list[Import] = []
    reader = _Reader(os.getcwd() if module else os.path.dirname(os.path.realpath(target)))
    try:
        files = reader.sources(target, main=True) if module else [target]
        for file in files:
            for one in reader.imports_of(file, main=file == files[-1]):
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

    def imports_of(self, file: str, main: bool = False) -> Iterator[Import]:
        if file in self._read:
            return
        self._read.add(file)
        try:
            with open(file, "rb") as source:
                tree = ast.parse(source.read())
        except (OSError, ValueError, SyntaxError):
            raise _Ended from None
        yield from self._run(tree.body, main)

    def _run(self, statements: Iterable[ast.stmt], main: bool) -> Iterator[Import]:
        for statement in statements:
            match statement:
                case ast.Import(names=names):
                    for alias in names:
                        yield from self._import(alias.name, ())
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    yield from self._import(module, tuple(alias.name for alias in names))
                case ast.If(test=test, orelse=orelse) if _is_type_checking(test) or (not main and _is_main(test)):
                    yield from self._run(orelse, main)
                case ast.Try():
                    yield from self._run(statement.body, main)
                    # A standby in which an import fails is not used, so nothing else can lead to the handlers.
                    certain = all(self._imports_installed(one) for one in statement.body)
                    if not certain and not all(_is_harmless(one) for h in statement.handlers for one in h.body):
                        raise _Ended
                    yield from self._run([*statement.orelse, *statement.finalbody], main)
                case _ if not _is_harmless(statement):
                    raise _Ended

    def _imports_installed(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Import(names=names):
                return all(self._is_installed(alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                return self._is_installed(module)
        return False

    def _import(self, name: str, names: tuple[str, ...]) -> Iterator[Import]:
        if self._is_installed(name):
            yield name, names
            return
        if "*" in names:  # with __all__ they may be submodules
            raise _Ended
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


def _is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "TYPE_CHECKING"
    return False


def _is_main(test: ast.expr) -> bool:
    match test:
        case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]):
            return True
    return False


def _is_harmless(statement: ast.stmt, in_class: bool = False) -> bool:
    """Of what is no import: certainly changes nothing that an import looks at."""
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=targets, value=value):
            return all(_is_plain(target, in_class) for target in targets) and _calls_nothing(value)
        case ast.AnnAssign(target=target, annotation=annotation, value=given):
            return _is_plain(target, in_class) and _calls_nothing(annotation, given)
        case ast.If(test=test, body=body, orelse=orelse):
            return _calls_nothing(test) and all(_is_harmless(one, in_class) for one in [*body, *orelse])
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            # A module's __getattr__ is called by an import.
            named = in_class or not statement.name.startswith("__")
            return named and not statement.decorator_list and _calls_nothing(statement.args, statement.returns)
        case ast.ClassDef():
            bare = not statement.decorator_list and _calls_nothing(*statement.bases, *statement.keywords)
            return bare and all(_is_harmless(one, in_class=True) for one in statement.body)
    return False


def _is_plain(target: ast.expr, in_class: bool) -> bool:
    match target:
        case ast.Name(id=name):
            return in_class or not name.startswith("__") or name in _PLAIN_DUNDERS
    return False


def _calls_nothing(*nodes: ast.AST | None) -> bool:
    calls = (ast.Call, ast.NamedExpr)
    return not any(isinstance(part, calls) for node in nodes if node is not None for part in ast.walk(node))
