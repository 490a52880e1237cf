"""A standby: an interpreter that has imported what the script imports and waits to become a worker.

    python -u .../standby.py FD script|module TARGET [ARGUMENT ...]        ftrun starts it so; not for use by hand

FD is one end of a socket pair. The standby writes a byte when it is ready; ftrun sends a byte with three descriptors: a file with
the worker's argv, environment and folder (JSON), and the worker's stdout and stderr. The end of the other end is the end of it.

This file is started by its path, not with ``-m``: the user's folder must not be in sys.path before the script is to run.
"""

from __future__ import annotations

import sys

_SAFE_PATH = bool(getattr(sys.flags, "safe_path", False))
if __name__ == "__main__" and not _SAFE_PATH:
    del sys.path[0]  # this file's folder

import contextlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import types  # noqa: E402
from typing import Any  # noqa: E402

# What ftcomm.init() imports.
_FTCOMM = ("api", "communicator", "job", "rendezvous", "init_methods", "stores.file")


def main(fd: int, kind: str, arguments: list[str]) -> None:
    os.set_inheritable(fd, False)
    sys.argv = list(arguments)  # for a library that looks at them when it is imported
    before = dict(os.environ)
    _preload(arguments[0], kind == "module")
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _leave_idle()
    with socket.socket(fileno=fd) as control:
        order = _wait(control)
    _become(order, set_by_imports)
    if kind == "module":
        _run_module(arguments[0])
    else:
        _run_script(sys.argv[0])


def _preload(target: str, module: bool) -> None:
    from ftcomm import _lib
    from ftcomm.launch.imports import leading_imports

    for name in _FTCOMM:
        importlib.import_module(f"ftcomm.{name}")
    _lib.lib()
    for name, names in leading_imports(target, module):
        # The script will tell of an import that fails. Some libraries call sys.exit() there.
        with contextlib.suppress(Exception, SystemExit):
            __import__(name, fromlist=names)


def _leave_idle() -> None:
    """ftrun starts a standby under SCHED_IDLE where it may come back; so have threads that a library has made."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
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


def _become(order: dict[str, Any], set_by_imports: dict[str, str]) -> None:
    if os.getcwd() != order["folder"]:
        os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update({**order["environment"], **set_by_imports})
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
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except SystemExit:
        raise
    except BaseException as error:
        _without_our_frames(error)
        raise
