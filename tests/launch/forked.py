"""ftrun in a process that is forked from the test: this one has imported torch already, which takes 1.6 s of a processor."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from typing import Any, NoReturn

import ftcomm.launch.cli as cli
from ftcomm.launch.parent import die_with_launcher


def popen(args: list[str], env: dict[str, str], **how: Any) -> subprocess.Popen[str]:
    """What ``python -m ftcomm.launch.cli ARGS`` would be, with this interpreter's flags."""
    # The child of a Popen runs this where it would exec; what is open there but for its three descriptors closes with it.
    dies = die_with_launcher()  # else it would outlive a test that is killed, and its workers with it
    return subprocess.Popen([sys.executable], text=True, preexec_fn=lambda: (dies(), _ftrun(args, env)), **how)  # noqa: PLW1509


def _ftrun(args: list[str], env: dict[str, str]) -> NoReturn:
    status = 1
    try:
        _forget_the_test(env)
        sys.argv = [cli.__file__, *args]
        status = _status_of_the_module()
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _forget_the_test(env: dict[str, str]) -> None:
    gc.freeze()  # harness.after_fork says why
    faulthandler.disable()
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) > 2:
            with contextlib.suppress(OSError):  # the list's own
                os.close(int(fd))
    atexit._clear()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]
    logging.root.handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", []):
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)


def _status_of_the_module() -> int:
    sys.modules.pop(cli.__name__)
    try:
        runpy.run_module(cli.__name__, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0
