"""How this process ends, as far as an atexit callback can know.

Python tells nobody: when callbacks run, an uncaught SystemExit is gone. But just before, the interpreter has read its ``code``,
from no Python frame; whoever catches one and looks at it does so from a frame.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from typing import Any, NoReturn

from ftcomm.errors import Error, StaleEpoch

STARTS_AGAIN = 83  #: of a process that ends because one of its log group died (policy replay): no failure of its own

_code: list[Any] = [None]
_watched = [False]


def end_with_group(error: Error) -> None:
    """Ends the process if that is what the error says: no program can go on then, and none needs to hear of it."""
    if isinstance(error, StaleEpoch) and "group" in error.evidence:
        os._exit(STARTS_AGAIN)


def failed() -> bool:
    """Whether the process is ending with an exit code that is not 0. Only to be asked at exit, after :func:`watch`."""
    return _code[0] not in (None, 0) or getattr(sys, "last_type", None) is not None


def watch() -> None:
    """From now on exit codes are noted. Only in a process that needs it: it replaces parts of SystemExit and sys.exit."""
    if _watched[0]:
        return
    _watched[0] = True
    plain = vars(SystemExit)["code"]

    class Code:
        """In place of the descriptor of SystemExit.code."""

        def __get__(self, error: BaseException | None, owner: type | None = None) -> Any:
            if error is None:
                return self
            code = plain.__get__(error, owner)
            if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
                _code[0] = code
            return code

        def __set__(self, error: BaseException, code: Any) -> None:
            plain.__set__(error, code)

    def exit(status: Any = None, /) -> NoReturn:
        raise SystemExit(status)  # the builtin leaves no object to read the code of, before Python 3.12

    # A built-in type takes no assignment; its dictionary does.
    gc.get_referents(vars(SystemExit))[0]["code"] = Code()
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    sys.exit = exit
