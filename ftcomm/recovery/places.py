"""Where logs are kept: a directory, or whatever fsspec can reach. The only part of the global store that knows the difference.

Every call raises FileNotFoundError or FileExistsError where that is the answer, and SystemFailure for all else.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from ftcomm.errors import ConfigError, Error, SystemFailure
from ftcomm.recovery._temporary import open_temporary, remove_abandoned

__all__ = ["PATIENCE", "SUFFIX", "TEMPORARY", "Directory", "Place", "open_place"]

SUFFIX, TEMPORARY = ".ftlog", ".tmp"
PATIENCE = 5.0  # seconds that Ctrl-C or an error waits for a request that hangs; then its thread is left to end with it
# Here an object is seen whole or not at all, and a rename would be a copy.
_OBJECT_STORES = {"abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a"}
_EXCLUSIVE = {"gcs", "gs", "memory", "s3", "s3a"}  # where a PUT can be told not to replace anything


def _temporary(path: str) -> str:
    """A name beside ``path`` that no other process and no later one has."""
    folder, _, last = path.rpartition("/")
    return f"{folder}/.{last}.{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}"


class Place(ABC):
    """Objects under one URL; a path is ``folder/folder/object``."""

    pauses: tuple[float, float]  # first and longest pause between looks for something new

    def __init__(self, url: str) -> None:
        self.url = url

    def where(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The last parts of all paths in the folder; none if there is no folder."""

    @abstractmethod
    def get(self, path: str) -> bytes: ...

    @abstractmethod
    def head(self, path: str, size: int) -> bytes:
        """The first ``size`` bytes, or more."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Makes the object: at once, or not at all. FileExistsError if it is there already."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Nothing happens if it is not there."""

    def remove_abandoned(self, path: str) -> None:
        """Removes a temporary file of a writer that was killed; one of a writer that lives as well, where that can't be known."""
        self.delete(path)

    @abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Removes a folder that is empty; else nothing happens."""


class Directory(Place):
    """A directory, usually on a file system that all hosts mount."""

    pauses = (0.002, 0.1)

    def __init__(self, url: str, path: str) -> None:
        super().__init__(url)
        self._root = path

    def _path(self, path: str) -> str:
        return os.path.join(self._root, path)

    @contextlib.contextmanager
    def _said(self, path: str, doing: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            raise SystemFailure(f"{self._path(path)} can't be {doing}: {error.strerror}.") from error

    def names(self, folder: str) -> list[str]:
        with self._said(folder, "listed"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self._path(folder))
        return []

    def get(self, path: str) -> bytes:
        with self._said(path, "read"), open(self._path(path), "rb") as file:
            return file.read()

    def head(self, path: str, size: int) -> bytes:
        with self._said(path, "read"), open(self._path(path), "rb") as file:
            return file.read(size)

    def put(self, path: str, data: bytes) -> None:
        final = self._path(path)
        with self._said(path, "written"):
            os.makedirs(os.path.dirname(final), exist_ok=True)
            temporary, file = open_temporary(lambda: _temporary(final))
            try:
                with file:  # its lock is held until it has its name
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    try:
                        os.link(temporary, final)  # a rename that replaces nothing
                    except FileExistsError:
                        raise
                    except OSError:  # a file system without hard links
                        if os.path.lexists(final):
                            raise FileExistsError(final) from None
                        os.rename(temporary, final)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)

    def delete(self, path: str) -> None:
        with self._said(path, "removed"), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(path))

    def remove_abandoned(self, path: str) -> None:
        remove_abandoned(self._path(path))

    def remove_folder(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._path(folder))


class Remote(Place):
    """What fsspec reaches. fsspec runs its requests on a thread of its own, one per process, that stays."""

    pauses = (0.05, 1.0)

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        super().__init__(url)
        self._fs = filesystem
        self._root = root.rstrip("/")
        names = filesystem.protocol
        self._protocols = {names} if isinstance(names, str) else set(names)
        self._exclusive = bool(self._protocols & _EXCLUSIVE)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    @contextlib.contextmanager
    def _said(self, path: str, doing: str) -> Iterator[None]:
        self._fs.invalidate_cache()  # else it answers from an old listing
        try:
            yield
        except (FileNotFoundError, FileExistsError, Error):
            raise
        except Exception as error:  # each package has its own exceptions
            raise SystemFailure(
                f"{self.where(path)} can't be {doing}: {type(error).__name__}: {str(error).rstrip('.')}."
            ) from error

    def names(self, folder: str) -> list[str]:
        with self._said(folder, "listed"), contextlib.suppress(FileNotFoundError):
            found = self._fs.ls(self._path(folder), detail=False)
            return [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return []

    def get(self, path: str) -> bytes:
        with self._said(path, "read"):
            return bytes(self._fs.cat_file(self._path(path)))

    def head(self, path: str, size: int) -> bytes:
        with self._said(path, "read"):
            try:
                return bytes(self._fs.cat_file(self._path(path), start=0, end=size))
            except FileNotFoundError:
                raise
            except Exception:  # noqa: BLE001 - some stores refuse a range of an object that is too small
                return bytes(self._fs.cat_file(self._path(path)))

    def put(self, path: str, data: bytes) -> None:
        final = self._path(path)
        with self._said(path, "written"):
            if self._protocols & _OBJECT_STORES:
                self._put_object(final, data)
                return
            self._fs.makedirs(final.rpartition("/")[0], exist_ok=True)
            if self._fs.exists(final):
                raise FileExistsError(final)
            temporary = _temporary(final)
            try:
                self._fs.pipe_file(temporary, data)
                self._fs.mv(temporary, final)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(temporary)
                raise

    def _put_object(self, final: str, data: bytes) -> None:
        if self._exclusive:
            try:
                self._fs.pipe_file(final, data, mode="create")
                return
            except Exception as error:
                if "notimplemented" not in f"{type(error).__name__} {error} {error.__cause__}".lower().replace(" ", ""):
                    raise
                self._exclusive = False  # a server that is not quite S3
        if self._fs.exists(final):
            raise FileExistsError(final)
        self._fs.pipe_file(final, data)

    def delete(self, path: str) -> None:
        with self._said(path, "removed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def remove_folder(self, folder: str) -> None:
        if not self._protocols & _OBJECT_STORES:
            with contextlib.suppress(Exception):
                self._fs.rmdir(self._path(folder))


def open_place(url: str, storage_options: Mapping[str, Any] | None = None) -> Place:
    """``/a/path``, ``file:///a/path``, or a URL for fsspec with the options for it."""
    url = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(url, str) or "\0" in url:
        raise ConfigError(f"The global store {url!r} is not valid: give a folder or a URL.")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ConfigError(f"storage_options={storage_options!r} must be a dict, or None.")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", url):  # else logs would go into a folder "s3:" of each host
        raise ConfigError(
            f"The global store {url!r} is no URL: it has one slash where a URL has two, and a folder none."
        )
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        path = rest if separator else url
        if not path or (separator and not path.startswith("/")):
            raise ConfigError(f"The global store {url!r} is not valid: give a folder, or file:///ABSOLUTE/PATH.")
        if storage_options:
            raise ConfigError(f"storage_options are for fsspec; the global store {url!r} is a directory and has none.")
        return Directory(url, os.path.abspath(path))
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            f"The global store {url!r} needs fsspec, which is not installed: pip install fsspec s3fs. "
            "A directory that all hosts mount needs nothing."
        ) from None
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        raise ConfigError(
            f"The global store {url!r} needs a package that is not installed (for s3:// it is s3fs). fsspec says: {error}."
        ) from None
    except ValueError as error:
        raise ConfigError(f"The global store {url!r} is not one that fsspec knows: {error}.") from None
    except Exception as error:
        raise SystemFailure(f"The global store {url!r} can't be reached: {type(error).__name__}: {error}.") from error
    return Remote(url, filesystem, root)
