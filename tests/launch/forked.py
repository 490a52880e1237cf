"""A launcher in a process that is forked from the test, which has imported torch already: 1.6 s of a processor each.

``workers=True``: so are those of its workers that run a script, from the launcher in its turn, with what a training script
imports sooner or later: 3 s each. All else of a worker is its launcher's: session, signals, environment, output, death.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from ftcomm import exit_code
from ftcomm.launch import standby, worker
from ftcomm.launch.parent import die_with_launcher

FTRUN = "ftcomm.launch.cli"
TORCHRUN = "torch.distributed.run"
TESTS = Path(__file__).parents[1]
_SEED = 67280421310721  # a fresh generator's
# What these modules register with atexit when they are imported, which was in the parent; in this order.
_AT_EXIT = (("ftcomm.job", "leave_all"), ("ftcomm.torch.groups", "_leave_all"))


def popen(
    args: list[str], env: dict[str, str], *, launcher: str = FTRUN, workers: bool = False, **how: Any
) -> subprocess.Popen[str]:
    """What ``python -m LAUNCHER ARGS`` would be, with this interpreter's flags."""
    if workers:
        _import_what_training_does()
    program = (sys.executable, "-m", launcher, *args)
    return _fork(lambda: _launcher(launcher, args, workers), program, env, text=True, **how)


def _fork(body: Callable[[], int], program: tuple[str, ...], env: dict[str, str], **how: Any) -> subprocess.Popen[Any]:
    # The child of a Popen runs this where it would exec; what is open there but for its three descriptors closes with it.
    dies = die_with_launcher()  # else it would outlive a test that is killed, and its workers with it
    alone = len(os.listdir("/proc/self/task")) == 1

    def run() -> None:
        dies()
        if alone or _resolver_is_free():
            _run(body, env)

    return subprocess.Popen(program, env=env, preexec_fn=run, **how)  # noqa: PLW1509


def _resolver_is_free() -> bool:
    """torchrun's agent looks up names in a thread. A lock that it holds while another thread forks stays locked in the child,
    whose first look-up would wait for ever: once in ten runs on a busy machine. Such a child execs, as any other does."""
    done, ends = os.pipe()
    dies = die_with_launcher()  # it may wait for ever
    probe = os.fork()
    if probe == 0:
        dies()
        with contextlib.suppress(OSError):
            socket.getaddrinfo("localhost", None)
        os._exit(0)
    os.close(ends)
    look = select.poll()
    look.register(done, select.POLLHUP)
    free = bool(look.poll(5000))
    os.close(done)
    os.kill(probe, signal.SIGKILL)
    os.waitpid(probe, 0)
    return free


def _import_what_training_does() -> None:
    # torch._dynamo: an optimizer imports it at its first step.
    for name in ("torch._dynamo", "torch.distributed.pipelining", "ftcomm.torch", "ftcomm.recovery"):
        importlib.import_module(name)


def _run(body: Callable[[], int], env: dict[str, str]) -> NoReturn:
    status = 1
    try:
        _forget_the_parent(env)
        try:
            status = body()
        except Exception:
            traceback.print_exc()
        exit_code._code[0] = status  # the interpreter would have read it just now
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _forget_the_parent(env: dict[str, str]) -> None:
    gc.freeze()  # harness.after_fork says why
    faulthandler.disable()
    atexit._clear()
    for module, function in _AT_EXIT:
        if module in sys.modules:
            atexit.register(getattr(sys.modules[module], function))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.set_wakeup_fd(-1)
    for handled in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(handled)):
            signal.signal(handled, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Last: the parent's Popen returns with that, as it does with an exec, and from then on may send signals.
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) > 2:
            with contextlib.suppress(OSError):  # the list's own
                os.close(int(fd))
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


def _launcher(module: str, args: list[str], workers: bool) -> int:
    if workers:
        worker.subprocess = types.SimpleNamespace(Popen=_worker)  # type: ignore[attr-defined]
        subprocess_handler.Popen = _worker
    sys.argv = [module, *args]
    sys.modules.pop(module, None)
    return _status_of(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def _worker(args: tuple[str, ...], env: dict[str, str], **how: Any) -> subprocess.Popen[Any]:
    if args[:2] != (sys.executable, "-u") or args[2] == "-m":
        return subprocess.Popen(args, env=env, **how)
    how.pop("preexec_fn", None)  # as that of _fork
    return _fork(lambda: _script(args[2:], env), args, env, **how)


def _script(args: tuple[str, ...], env: dict[str, str]) -> int:
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    torch.manual_seed(_SEED)
    sys.argv = [*args]
    sys.path[:] = [one for one in sys.path if not Path(one).is_relative_to(TESTS)]
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(f"{TESTS}/"):
            del sys.modules[name]
    return _status_of(lambda: standby._run_script(args[0]))


def _status_of(body: Callable[[], object]) -> int:
    try:
        body()
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
