"""CheckpointFolder: saves, keeps the newest few, finds the newest whole one."""

from __future__ import annotations

import errno
import os
import re
import threading
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import IO, Any

import torch

from ftcomm.errors import Closed, ConfigError, Error, SystemFailure
from ftcomm.recovery._numbers import count
from ftcomm.recovery.checkpoint_files import content
from ftcomm.recovery.checkpoint_files.content import Entry
from ftcomm.recovery.checkpoint_files.files import Files, LocalFiles
from ftcomm.recovery.checkpoint_files.memory import Buffers, Tensors
from ftcomm.recovery.checkpoint_files.state import copied

__all__ = ["CheckpointFolder"]

_FULL = (errno.ENOSPC, errno.EDQUOT)
# The medium has lost it. Other errors, such as a missing permission, are not the file's: an older one would not be the answer.
_LOST = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA)


class CheckpointFolder:
    """Checkpoints of one process in a folder, one file for each step, ``step-000000120-<checksum>.pt``.

    A file is there whole or not at all, also after a crash at any moment: a temporary file is written, made durable, and then
    renamed to the name that has its checksum. Any ``torch.load(path, weights_only=True)`` reads it. Tensors come back on the
    CPU, without ``requires_grad``; those that shared memory share it again.

    For one thread of one process: others take another ``name``, or another folder.

    Args:
        folder: is made if it is not there.
        keep: how many to keep, at least 1. With 2 or more there is still one if the newest is damaged later.
        name: first part of the file names: letters, digits, ``_``, ``-`` and ``.``.

    Raises:
        ConfigError: an argument is wrong, or the folder is a file.
        SystemFailure: the folder can't be made or read.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, name: str = "step") -> None:
        keep = count("keep", keep, "checkpoints")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
            raise ConfigError(
                f"name={name!r} must be 1 to 100 letters, digits, '_', '-' or '.', and not begin with '-' or '.'."
            )
        if (
            not isinstance(folder, (str, os.PathLike))
            or not isinstance(os.fspath(folder), str)
            or not os.fspath(folder)
            or "\0" in os.fspath(folder)
        ):
            raise ConfigError(f"folder={folder!r} must be a path.")
        self._where = os.path.abspath(folder)
        self._keep = keep
        self._name = name
        self._buffers = Buffers()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged: set[str] = set()  # names of those found so
        self._warned_of_later = False
        self._closed = False
        try:
            self._files: Files = LocalFiles(self._where, name)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"The checkpoint folder {self._where} is, or lies in, a file. Give another one."
            ) from None
        except OSError as error:
            raise SystemFailure(f"The checkpoint folder {self._where} can't be used: {error.strerror}.") from error

    @property
    def path(self) -> str:
        """The folder's, absolute."""
        return self._where

    def save(self, step: int, state: dict[Any, Any], wait: bool = True, *, prune: bool = True) -> None:
        """Saves the state; then the oldest checkpoints beyond ``keep`` are removed, but never the one just saved.

        A checkpoint of the same step is replaced. A save that is still under way is waited for first.

        Args:
            step: zero or more; the highest is the newest.
            state: tensors, numbers, strings, None, bytes, and dicts, lists and tuples of these: what ``state_dict()`` gives.
            wait: False: returns when the tensors are copied to CPU memory, which the next such save uses again; training
                may then change them. A thread writes them, and the next call of save(), wait() or close() raises its error.
            prune: False: nothing is removed yet; :meth:`prune` does that, or :meth:`discard` takes this one back.

        Raises:
            ConfigError: something in the state would not be read back; the message says where it is. Nothing was written.
            SystemFailure: it could not be written (the disk is full, ...). Older checkpoints are as they were.
        """
        self._check_open()
        step = _step(step)
        self.wait()
        tensors = Tensors()
        copy = copied(state, tensors.add)
        tensors.place(None if wait else self._buffers)
        if wait:
            self._write(step, copy, prune)
            return
        # Not a daemon: a program that ends well has its last checkpoint.
        self._thread = threading.Thread(target=self._run, args=(step, copy, prune), name=f"ftcomm-checkpoint-{step}")
        self._thread.start()

    def newest(self) -> tuple[int, dict[Any, Any]] | None:
        """Step and state of the newest whole checkpoint; None if there is none. A save under way is waited for.

        A damaged one is skipped, with a RuntimeWarning that says which and why.

        Raises:
            SystemFailure: the folder or a file in it can't be read, although it is not damaged.
        """
        self._check_open()
        self._join()
        for entry in self._entries():
            state = self._read(entry)
            if state is not None:
                return entry.step, state
        return None

    def load(self, step: int) -> dict[Any, Any] | None:
        """State of this step's checkpoint; None if it is not there or, with a RuntimeWarning, damaged.

        Raises:
            SystemFailure: as :meth:`newest`.
        """
        self._check_open()
        step = _step(step)
        self._join()
        for entry in self._entries():
            if entry.step == step and (state := self._read(entry)) is not None:
                return state
        return None

    def steps(self) -> list[int]:
        """Steps of the files whose names are right, ascending. What is in them was not looked at."""
        self._check_open()
        return sorted({entry.step for entry in self._entries()})

    def wait(self) -> None:
        """Returns when the last save is on the disk.

        Raises:
            SystemFailure: a ``save(wait=False)`` failed. It is raised once.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def prune(self, step: int) -> None:
        """Keeps the checkpoint of ``step`` and the newest ones before it, ``keep`` in all, and later ones.

        Those are of another run, and say nothing about how far back this one may have to go.
        """
        self._check_open()
        step = _step(step)
        self._join()
        self._thin(entry for entry in self._entries() if entry.step <= step)

    def discard(self, step: int) -> None:
        """The checkpoint of ``step`` counts for nothing."""
        self._check_open()
        step = _step(step)
        self._join()
        for entry in self._entries():
            if entry.step == step:
                self._remove(entry)

    def close(self) -> None:
        """Waits for a save under way, raises its error, and frees the memory. May be called twice."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._buffers = Buffers()

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Error as failed:
            if kind is None:
                raise
            warnings.warn(str(failed), RuntimeWarning, stacklevel=2)  # the exception under way says more

    # Writing

    def _run(self, step: int, state: dict[Any, Any], prune: bool) -> None:
        try:
            self._write(step, state, prune)
        except BaseException as error:  # noqa: BLE001 - the caller's, at its next call
            self._error = error

    def _write(self, step: int, state: dict[Any, Any], prune: bool) -> None:
        def fill(file: IO[bytes]) -> str:
            return Entry.make(self._name, step, content.write(file, state)).name

        try:
            name = self._files.put(fill)
        except OSError as error:
            raise SystemFailure(self._not_written(step, error)) from error
        self._damaged.discard(name)
        if prune:
            self._prune(step, name)

    def _not_written(self, step: int, error: OSError) -> str:
        try:
            steps = sorted({entry.step for entry in self._entries()})
        except Error:
            left = "What else is there is not known"
        else:
            left = f"Left is what was there: step {', '.join(map(str, steps))}" if steps else "There is no older one"
        do = f"Free space, or keep fewer (keep={self._keep})" if error.errno in _FULL else "Put that right"
        return (
            f"The checkpoint of step {step} was not written to {self._where}: {error.strerror or error}. {left}. {do}, "
            "and save again."
        )

    def _prune(self, step: int, name: str) -> None:
        """Removes what the new file makes superfluous. It is whole, and counts first, whatever the steps of others are."""
        later = max(self._thin(sorted(self._entries(), key=lambda entry: entry.name != name)), default=step)
        if later > step and not self._warned_of_later:
            self._warned_of_later = True
            warnings.warn(
                f"The checkpoint of step {step} is in {self._where} with one of step {later}, which stays the newest. A run "
                "from the start needs an empty folder, or another name.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _thin(self, entries: Iterable[Entry]) -> set[int]:
        """Keeps the first ``keep`` that are not known to be damaged, one of each step. Returns their steps."""
        kept: set[int] = set()
        for entry in entries:
            if entry.step in kept or len(kept) >= self._keep:
                self._remove(entry)
            elif entry.name not in self._damaged:
                kept.add(entry.step)
        return kept

    def _remove(self, entry: Entry) -> None:
        try:
            self._files.remove(entry.name)
        except OSError as error:  # the new one is there: that is no failure of the save
            path = os.path.join(self._where, entry.name)
            warnings.warn(
                f"The old checkpoint {path} can't be removed: {error.strerror}.", RuntimeWarning, stacklevel=6
            )
        self._damaged.discard(entry.name)

    # Reading

    def _entries(self) -> list[Entry]:
        """The newest first. Of one step there are two files after a crash while it was replaced: first the later written."""
        try:
            names = self._files.names()
        except OSError as error:
            raise SystemFailure(f"The checkpoint folder {self._where} can't be read: {error.strerror}.") from error
        found = [entry for name in reversed(names) if (entry := Entry.parse(self._name, name)) is not None]
        return sorted(found, key=lambda entry: -entry.step)

    def _read(self, entry: Entry) -> dict[Any, Any] | None:
        """None: it is damaged, or was removed since it was listed."""
        path = os.path.join(self._where, entry.name)
        try:
            with self._files.open(entry.name) as file:
                if content.digest(file) != entry.digest:
                    self._skip(
                        entry, f"its {file.tell()} bytes do not match the checksum in its name: torn, or changed later"
                    )
                    return None
                file.seek(0)
                return _load(file, path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _LOST:
                self._skip(entry, f"{error.strerror}")
                return None
            raise SystemFailure(f"The checkpoint {path} can't be read: {error.strerror}.") from error

    def _skip(self, entry: Entry, reason: str) -> None:
        self._damaged.add(entry.name)
        path = os.path.join(self._where, entry.name)
        warnings.warn(f"The checkpoint {path} is damaged and skipped: {reason}.", RuntimeWarning, stacklevel=4)

    # Common

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"This CheckpointFolder ({self._where}) was closed. Make a new one.")


def _step(step: Any) -> int:
    return count("step", step, "steps", least=0)


def _load(file: IO[bytes], path: str) -> dict[Any, Any]:
    try:
        state: dict[Any, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # Its checksum is right: to go on with an older one would hide that.
        raise SystemFailure(
            f"The checkpoint {path} is whole, but torch {torch.__version__} can't load it: {type(error).__name__}: {error}. "
            "Is memory short, or was it written by a newer torch?"
        ) from error
    return state
