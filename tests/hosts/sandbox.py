"""What containers take away: system calls (a seccomp filter as Docker's, answering ENOSYS) and the sight of other processes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct

from harness import after_fork
from network import CLONE_NEWPID, unshare

_ARM = platform.machine() == "aarch64"
SYSTEM_CALLS = {
    "pidfd_open": 434,
    "futex_waitv": 449,
    "memfd_create": 279 if _ARM else 319,
    "set_robust_list": 99 if _ARM else 273,
    "process_vm_readv": 270 if _ARM else 310,
}
_SECCOMP = 277 if _ARM else 317
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def forbid(*names: str) -> None:
    """From now on, in this process, all its threads and its children, these system calls do not exist."""
    program = [(_LOAD, 0, 0, 0)]
    for name in names:
        program += [(_EQUAL, 0, 1, SYSTEM_CALLS[name]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) != 0:  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "prctl")
    if libc.syscall(_SECCOMP, 1, 1, ctypes.c_char_p(header)) != 0:  # SECCOMP_SET_MODE_FILTER, _FLAG_TSYNC
        raise OSError(ctypes.get_errno(), "seccomp")


def own_process_numbers() -> None:
    """Returns in a process that is number 2 of a namespace of its own; the one that called ends as that one does."""
    unshare(CLONE_NEWPID)
    init = os.fork()
    if init:
        status = os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])
        if status == 128 + signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(status)
    after_fork()
    child = os.fork()
    if child:  # number 1, which no signal from inside can kill
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(128 - status if status < 0 else status)
    assert os.getpid() == 2
