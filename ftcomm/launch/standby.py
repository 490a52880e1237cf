"""A standby: an interpreter that has imported what the script imports and waits to become a worker.

    python -u .../standby.py FD script|module NAME,... TARGET [ARGUMENT ...]      ftrun starts it so; not for use by hand

FD is one end of a socket pair, the NAMEs are of environment variables that a worker has of its own: these come later. The standby
writes a byte when it is ready; ftrun sends a byte with three descriptors: a file with the worker's argv, those variables and its
folder (JSON), and the worker's stdout and stderr. The end of the other end is the end of it.

Where it can't be sure that the script would find all as in a fresh interpreter, it says why and exits before it is ready.

This file is started by its path, not with ``-m``: the user's folder must not be in sys.path before the script is to run.
"""

from __future__ import annotations

import sys

_AT_START = frozenset(sys.modules)  # what any interpreter has
_SAFE_PATH = bool(getattr(sys.flags, "safe_path", False))
if __name__ == "__main__" and not _SAFE_PATH:
    del sys.path[0]  # this file's folder

import contextlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import types  # noqa: E402
from importlib.machinery import PathFinder  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

# What ftcomm.init() imports.
_FTCOMM = ("api", "communicator", "job", "rendezvous", "init_methods", "stores.file")


def main(fd: int, kind: str, particular: set[str], arguments: list[str]) -> None:
    os.set_inheritable(fd, False)
    module = kind == "module"
    sys.argv = list(arguments)  # for a library that looks at them when it is imported
    environment, path, folder = dict(os.environ), list(sys.path), os.getcwd()
    _preload(arguments[0], module)
    touched = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    if touched & particular:
        _refuse(f"an import sets or deletes {', '.join(sorted(touched & particular))}, which a worker has of its own")
    if sys.path[: len(path)] != path or sys.argv != arguments or os.getcwd() != folder:
        _refuse("an import changes sys.path, sys.argv or the working directory")
    if not _SAFE_PATH:
        _refuse_shadows(folder if module else os.path.dirname(os.path.realpath(arguments[0])))
    leave_idle("self")
    with socket.socket(fileno=fd) as control:
        order = _wait(control)
    _become(order)
    if module:
        _run_module(arguments[0])
    else:
        _run_script(sys.argv[0])


def _refuse(why: str) -> NoReturn:
    """ftrun tells the last line. No handler of a library's: its threads may never end."""
    os.write(2, f"\n{' '.join(why.split())}\n".encode(errors="replace"))
    os._exit(1)


def _preload(target: str, module: bool) -> None:
    from ftcomm import _lib
    from ftcomm.launch.imports import leading_imports

    for name in _FTCOMM:
        importlib.import_module(f"ftcomm.{name}")
    _lib.lib()
    for name, names in leading_imports(target, module):
        try:
            found = __import__(name, fromlist=names)
            for one in names:
                if one != "*":
                    getattr(found, one)  # some are made only when they are asked for
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the script's own import has to tell it
            _refuse(f"import {name}: {type(error).__name__}: {error}")


def _refuse_shadows(folder: str) -> None:
    """The script's folder comes first in sys.path: it would have got its own module where there is one."""
    for name in sorted({name.partition(".")[0] for name in sys.modules} - _AT_START - {*sys.builtin_module_names}):
        own = PathFinder.find_spec(name, [folder])
        if own is None or own.loader is None:  # a folder without __init__.py: only where there is nothing else
            continue
        have = getattr(sys.modules.get(name), "__file__", None)
        if not have or not own.origin or os.path.realpath(have) != os.path.realpath(own.origin):
            _refuse(f"{own.origin} is in place of the module {name} that has been imported already")


def leave_idle(process: int | str) -> None:
    """ftrun sets SCHED_IDLE for a standby where it may come back; so have threads that a library has made."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                if os.sched_getscheduler(int(thread)) == os.SCHED_IDLE:
                    os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def _wait(control: socket.socket) -> dict[str, Any]:
    control.sendall(b"r")
    word, descriptors, _, _ = socket.recv_fds(control, 1, 3)
    if not word:
        os._exit(0)  # nothing to tidy up: no line of the script has run
    order, out, err = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    with open(order, encoding="utf-8", errors="surrogateescape") as file:
        found: dict[str, Any] = json.load(file)
    return found


def _become(order: dict[str, Any]) -> None:
    if os.getcwd() != order["folder"]:
        os.chdir(order["folder"])
    os.environ.update(order["environment"])  # no import has touched these, and what it did to others stays
    sys.argv = order["argv"]
    sys.orig_argv = order["command"]


def _main_module(**attributes: Any) -> dict[str, Any]:
    """A fresh ``__main__``, as the interpreter makes it."""
    module = types.ModuleType("__main__")
    namespace = module.__dict__
    namespace.update(__builtins__=sys.modules["builtins"], **attributes)
    if "__annotations__" in globals():  # up to Python 3.13
        namespace["__annotations__"] = {}
    sys.modules["__main__"] = module
    return namespace


def _run_script(path: str) -> None:
    from importlib.machinery import SourceFileLoader

    file = os.path.join(os.getcwd(), path)
    loader = SourceFileLoader("__main__", file)
    namespace = _main_module(__file__=file, __cached__=None, __loader__=loader)
    if not _SAFE_PATH:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    try:
        with open(file, "rb") as source:
            text = source.read()
    except OSError as error:  # the interpreter's words
        sys.exit(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}")
    exec(compile(text, file, "exec", dont_inherit=True), namespace)


def _run_module(name: str) -> None:
    import runpy

    _main_module()
    if not _SAFE_PATH:
        sys.path.insert(0, os.getcwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _without_our_frames(error: BaseException) -> None:
    """The traceback of an uncaught exception begins in the script. All else is left to the interpreter."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.excepthook = lambda *_: None


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], {*sys.argv[3].split(",")}, sys.argv[4:])
    except SystemExit:
        raise
    except BaseException as error:
        _without_our_frames(error)
        raise
