"""The folder of the pair log: ftrun makes it for a run under the policy replay, and removes it at the end (L9); so too the folder
on disk that the log spills to, if there is one.

The file ``owner`` in each tells whose it is and is locked as long as that ftrun lives. The lock tells processes of another pid
namespace about it, which may share the folder's file system; pid, start time and boot tell where a file system has no locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ftcomm._lib import lib
from ftcomm.boot import boot_id
from ftcomm.launch.folder import make_folder
from ftcomm.launch.locks import try_lock

_MEMORY = Path("/dev/shm")
_OWNER, _SCRATCH = "owner", ".owner"
_FOLDER = re.compile(r"^ftcomm-log-(\d+)-(\d+)-\w+$")
_UNFINISHED = 60.0  # seconds; a folder without an owner's file is younger, or its maker died while it made it


def default_place() -> Path:
    """tmpfs; where there is none, the temporary folder."""
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class _Owned:
    """A folder, made just now, with the owner's file in it."""

    def __init__(self, path: Path, notes: dict[str, str], option: str) -> None:
        self.path, self._notes = path, notes
        try:
            # Locked before it gets its name: whoever sees it sees it locked.
            scratch = path / _SCRATCH
            self.fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try_lock(self.fd)
            self.claim("")
            os.rename(scratch, path / _OWNER)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise OSError(
                error.errno, f"{error.strerror}: the pair log's folder {path}; give it another place ({option})"
            ) from error
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def claim(self, job: str) -> None:
        owner = {"pid": os.getpid(), "start": start_time(os.getpid()), "boot": boot_id(), "job": job, **self._notes}
        text = json.dumps(owner).encode() + b"\n"
        os.pwrite(self.fd, text, 0)
        os.ftruncate(self.fd, len(text))

    def remove(self) -> None:
        _remove(self.path)
        os.close(self.fd)


class PairLog:
    """A folder of its own in ``place`` (default: tmpfs), so that nothing else is ever removed with it.

    ``spill``: where the workers put what is above their limit. They do so in a folder of the log's name, which is made here, too:
    so it has an owner, and goes with the log.
    """

    def __init__(self, place: str | None = None, spill: str | None = None) -> None:
        remove_logs_of_others()
        parent = _place(Path(place).resolve() if place else default_place(), "folder for the pair log", "--pair-log")
        notes = {"spill": str(Path(spill).resolve())} if spill else {}
        self.path = Path(tempfile.mkdtemp(prefix=f"ftcomm-log-{os.getuid()}-{os.getpid()}-", dir=parent))  # 0700
        self.folders = [_Owned(self.path, notes, "--pair-log")]
        try:
            if notes and Path(notes["spill"]) != parent:
                spilled = _place(Path(notes["spill"]), "folder to spill to", "FTCOMM_LOG_SPILL") / self.path.name
                spilled.mkdir(0o700)
                self.folders.append(_Owned(spilled, {"node": os.uname().nodename}, "FTCOMM_LOG_SPILL"))
        except BaseException:
            self.remove()
            raise

    def claim(self, job: str) -> None:
        """Writes who owns it, for which job."""
        for folder in self.folders:
            folder.claim(job)

    def remove(self) -> None:
        """After the last worker's end."""
        for folder in reversed(self.folders):  # the log's last: its owner's file says where the other one is
            folder.remove()


def _place(parent: Path, what: str, option: str) -> Path:
    """Makes it, and removes there what killed runs have left behind."""
    make_folder(parent, what, option)
    remove_abandoned_logs(parent)
    return parent


def remove_abandoned_logs(place: Path, report: Callable[[str], None] | None = None) -> None:
    """Removes this user's logs in ``place`` whose ftrun is gone, with what they have spilled, never one whose ftrun lives."""
    try:
        entries = list(place.iterdir())
    except OSError:
        return
    for entry in entries:
        _remove_if_abandoned(entry, report)


def remove_logs_of_others(report: Callable[[str], None] | None = None) -> None:
    """Removes this user's logs of killed runs that no ftrun has started, from where they are without a log_dir."""
    ffi, C = lib()
    place = Path(ffi.string(C.ft_logs_place()).decode())
    before = _entries(place)
    C.ft_remove_old_logs()
    for gone in sorted(before - _entries(place)):
        if report is not None:
            report(str(place / gone))
    with contextlib.suppress(OSError):  # another run has begun
        place.rmdir()


def _entries(place: Path) -> set[str]:
    try:
        return set(os.listdir(place))
    except OSError:
        return set()


def _remove_if_abandoned(entry: Path, report: Callable[[str], None] | None) -> None:
    match = _FOLDER.match(entry.name)
    if match is None or entry.is_symlink():
        return
    with contextlib.suppress(OSError):  # another process removes it as well
        facts = entry.stat()
        if facts.st_uid != os.getuid():
            return
        with _unlocked(entry) as free:
            if not free or _lives(entry, int(match[2]), time.time() - facts.st_mtime):
                return
            if (spilled := _spilled(entry)) is not None:  # before the note of it is gone
                _remove_if_abandoned(spilled, report)
            if not _remove(entry):
                return
        if report is not None:
            report(str(entry))


def _remove(folder: Path) -> bool:
    """Whether it is gone. The owner's file goes last: who is killed meanwhile leaves what the next one knows as abandoned."""
    with contextlib.suppress(OSError):
        for entry in [one for one in folder.iterdir() if one.name != _OWNER]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry)
        if set(os.listdir(folder)) <= {_OWNER}:
            shutil.rmtree(folder)
            return True
    return False


def _spilled(log: Path) -> Path | None:
    """The folder of the same name that the log's owner has made to spill to; it has an owner's file of its own."""
    try:
        noted = json.loads((log / _OWNER).read_bytes()).get("spill")
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    spilled = Path(noted) / log.name if isinstance(noted, str) else log
    return spilled if spilled != log and spilled.is_dir() else None


@contextlib.contextmanager
def _unlocked(folder: Path) -> Iterator[bool]:
    """True while nobody has the folder's owner file locked, as far as the file system knows of locks."""
    try:
        fd = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)  # NFS locks no other for one alone
    except FileNotFoundError:
        yield True
        return
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def _lives(folder: Path, named: int, age: float) -> bool:
    """Whether the owner's process exists. ``named``: the pid in the folder's name, for one whose file was never written."""
    try:
        owner = json.loads((folder / _OWNER).read_bytes())
        pid, start, boot = int(owner["pid"]), int(owner["start"]), str(owner["boot"])
        node = owner.get("node", os.uname().nodename)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        started = set(os.listdir(folder)) <= {_OWNER, _SCRATCH}  # else it is no ftrun's
        return not started or start_time(named) is not None or age < _UNFINISHED
    if node != os.uname().nodename:
        return True  # a disk that hosts share, maybe without locks: who made it there removes it
    return boot == boot_id() and start_time(pid) == start


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if there is none of this pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may have blanks and brackets
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
