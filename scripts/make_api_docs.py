"""Writes docs/api.md from the docstrings of the public names, and the tables of docs/operations.md from the code.

    scripts/make_api_docs.py            writes them (make docs)
    scripts/make_api_docs.py --check    writes nothing; says what is out of date, exit code 1

Needs the installed package, and torch for ftcomm.torch.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ftcomm
from ftcomm import dtypes
from ftcomm._lib import lib
from ftcomm.options import Options, environment_name

ROOT = Path(__file__).resolve().parents[1]
INTRO = """# API reference

Made from the docstrings by `make docs`; do not edit. Counts are elements and times are seconds unless said otherwise. What
each option means is in [operations](operations.md#options), which error calls for what in [operations](operations.md#errors).
"""
# Section -> names in ftcomm, in the order of a reader's needs.
SECTIONS = {
    "Start": ("init", "is_initialized", "default_communicator", "get_rank", "get_world_size", "leave", "Options"),
    "Communicators": ("Communicator",),
    "Operations under way": ("Outcome", "Request", "wait_all"),
    "Module-level calls": (
        "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter",
        "reduce_scatter_tensor", "gather", "scatter", "all_to_all_single", "barrier", "send", "recv", "isend", "irecv",
        "ft_all_reduce", "ft_send", "ft_recv", "ANY",
    ),
    "Errors": (
        "Error", "PeerFailure", "Revoked", "StaleEpoch", "NoAuthority", "Timeout", "ConfigError", "Mismatch", "Unsupported",
        "Closed", "Interrupted", "Cancelled", "Truncated", "SystemFailure", "LogFull", "LogCorrupt", "ReplayDiverged",
        "InternalError",
    ),
    "Jobs": ("Job",),
}  # fmt: skip
MODULES = {
    "ftcomm.torch": "Torch: `ftcomm.torch`",
    "ftcomm.recovery": "Planning a recovery by logs: `ftcomm.recovery`",
    "ftcomm.stores": "Stores: `ftcomm.stores`",
}
_NOT_MADE = (ftcomm.Communicator, ftcomm.Request, ftcomm.Job)  # by users
_HEADING = re.compile(r"^(Args|Attributes[^:]*|Raises[^:]*|Returns):$")


def markdown(text: str) -> str:
    """A docstring as Markdown: roles and double backquotes become code, Args/Raises/Attributes become lists."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text.replace("``", "`"))
    out: list[str] = []
    listing = False
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            out += [f"**{heading[1]}**", ""]
            listing = True
        elif listing and re.match(r"^    \S", line):
            name, colon, rest = line.strip().partition(": ")
            out.append(f"- `{name}`: {rest}" if colon else f"- {line.strip()}")
        elif listing and line.startswith("     "):
            out[-1] += " " + line.strip()
        else:
            listing = listing and not line
            out.append(line)
    return "\n".join(out).strip()


def doc(thing: Any, name: str) -> str:
    text = inspect.getdoc(thing)
    if not text:
        raise SystemExit(f"{name} has no docstring")
    return markdown(text)


def signature(function: Any, name: str) -> str:
    parts = []
    found = inspect.signature(function)
    star = False
    for parameter in found.parameters.values():
        if parameter.name == "self" or (parameter.name == "cls" and not parts):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(mark + parameter.name + default)
    returned = found.return_annotation
    arrow = "" if returned in (inspect.Signature.empty, "None", None) else f" -> {_name(returned)}"
    return f"{name}({', '.join(parts)}){arrow}"


def made(cls: type, name: str) -> str:
    """How one is made, where a user makes it, and no table of fields says how."""
    if (
        cls in _NOT_MADE
        or "__init__" not in vars(cls)
        or dataclasses.is_dataclass(cls)
        or issubclass(cls, BaseException)
    ):
        return ""
    return f"`{signature(cls.__init__, name)}`\n\n"


def _name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties in the order of their definition, those of the class's own first."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("ftcomm"):
            continue
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if inspect.isfunction(function) or isinstance(member, property):
                yield name, member


def describe(name: str, thing: Any, level: str = "###") -> Iterator[str]:
    if isinstance(thing, int):
        yield f"{level} `{name} = {thing}`\n\nAs a receive's source: whoever sends first.\n"
        return
    if not inspect.isclass(thing):
        yield f"{level} `{signature(thing, name)}`\n\n{doc(thing, name)}\n"
        return
    bases = ", ".join(b.__name__ for b in thing.__bases__ if b is not object and b.__name__ not in _MIXINS)
    yield f"{level} `class {name}{f'({bases})' if bases else ''}`\n\n{made(thing, name)}{doc(thing, name)}\n"
    inherited = ftcomm.Error if issubclass(thing, ftcomm.Error) and thing is not ftcomm.Error else None
    for member_name, member in members(thing):
        if inherited is not None and hasattr(inherited, member_name):
            continue
        if isinstance(member, property):
            yield f"{level}# `{member_name}`\n\n{doc(member, f'{name}.{member_name}')}\n"
        else:
            function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            shown = signature(function, member_name)
            yield f"{level}# `{shown}`\n\n{doc(function, f'{name}.{member_name}')}\n"


_MIXINS = ("Collectives", "PointToPoint", "ABC")


def api() -> str:
    listed = {name for names in SECTIONS.values() for name in names}
    missing = set(ftcomm.__all__) - listed - {"__version__"}
    if missing:
        raise SystemExit(f"scripts/make_api_docs.py: no section for {', '.join(sorted(missing))}")
    out = [INTRO]
    for title, names in SECTIONS.items():
        out.append(f"## {title}\n")
        for name in names:
            out += describe(f"ftcomm.{name}", getattr(ftcomm, name))
    for module, title in MODULES.items():
        found = importlib.import_module(module)
        out.append(f"## {title}\n\n{doc(found, module)}\n")
        for name in found.__all__:
            if not isinstance(getattr(found, name), int):
                out += describe(f"{module}.{name}", getattr(found, name))
    return "\n".join(out).rstrip() + "\n"


def options_table() -> str:
    """Fields of Options with variable, flag, default and meaning."""
    tree = ast.parse((ROOT / "ftcomm" / "launch" / "cli.py").read_text())
    flags = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OPTION_FLAGS"
    )
    rows = ["| field | variable | ftrun | default | meaning |", "|---|---|---|---|---|"]
    for field in Options.__dataclass_fields__.values():
        name, default = field.name, field.metadata["default"]
        flag = f"`--{name}`" if name in flags or name == "events" else ""
        shown = "none" if default is None else f"`{default}`"
        rows.append(f"| `{name}` | `{environment_name(name)}` | {flag} | {shown} | {field.metadata['meaning']} |")
    return "\n".join(rows)


def failpoints_table() -> str:
    ffi, C = lib()
    points = json.loads(ffi.string(C.ft_fault_points()).decode())
    return "\n".join(
        ["| point | when |", "|---|---|", *(f"| `{point['name']}` | {point['where']} |" for point in points)]
    )


def operators_table() -> str:
    _, C = lib()
    rows = [f"| type | {' | '.join(dtypes.OPS)} |", "|---" * (len(dtypes.OPS) + 1) + "|"]
    for name, number in dtypes.DTYPES.items():
        cells = ("yes" if C.ft_reduce_supported(number, op) else "" for op in dtypes.OPS.values())
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {
    "options": options_table,
    "failpoints": failpoints_table,
    "operators": operators_table,
}


def operations(text: str) -> str:
    """The page with its tables made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"docs/operations.md has no place for the table {name}: {begin} ... {end}")
        text = f"{head}{begin}\n{make()}\n{end}{tail}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = ROOT / "docs" / "operations.md"
    stale = 0
    for path, text in ((ROOT / "docs" / "api.md", api()), (page, operations(page.read_text()))):
        before = path.read_text() if path.exists() else ""
        if before == text:
            continue
        if not check:
            path.write_text(text)
            continue
        stale = 1
        name = str(path.relative_to(ROOT))
        print(f"{name} is out of date: run `make docs`")
        sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), text.splitlines(True), name, name, n=0))
    return stale


if __name__ == "__main__":
    sys.exit(main())
