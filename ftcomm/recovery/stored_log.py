"""One log in the global store: its objects' names, and reading them."""

from __future__ import annotations

from urllib.parse import quote

from ftcomm.errors import ConfigError, LogCorrupt
from ftcomm.recovery.chunks import CHUNK, END, Chunk, Header, header_bytes, parse, parse_header
from ftcomm.recovery.places import SUFFIX, Place

__all__ = ["END_MARKER", "StoredLog", "folder_of"]

END_MARKER = "end" + SUFFIX


def folder_of(kind: str, name: str) -> str:
    """A job's or a log's folder: its name, without what has a meaning in paths and URLs."""
    good = isinstance(name, str) and 0 < len(name) <= 200
    if not good or any(c.isspace() or c == "/" or not c.isprintable() for c in name):
        raise ConfigError(f"The {kind} name {name!r} must have 1 to 200 printable characters, no blank and no slash.")
    quoted = quote(name, safe="-_.~:=@,+")
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if len(quoted) > 255:
        raise ConfigError(
            f"The {kind} name {name!r} is too long for a folder's name: {len(quoted)} bytes; at most 255."
        )
    return quoted


def _digits(ordinal: int) -> str:
    return f"{ordinal:08d}"


class StoredLog:
    """The log ``name`` of ``job`` at a place."""

    def __init__(self, place: Place, job: str, name: str) -> None:
        self.place, self.job, self.name = place, job, name
        self.folder = f"{folder_of('job', job)}/{folder_of('log', name)}"

    def __str__(self) -> str:
        return f"log {self.name!r} of job {self.job!r} in {self.place.url}"

    def path(self, ordinal: int) -> str:
        return f"{self.folder}/{_digits(ordinal)}{SUFFIX}"

    @property
    def end_path(self) -> str:
        return f"{self.folder}/{END_MARKER}"

    def where(self, ordinal: int) -> str:
        return f"Chunk {ordinal} ({self.place.where(self.path(ordinal))})"

    def present(self) -> tuple[list[int], bool]:
        """The ordinals of the chunks that are there, and whether the end marker is."""
        names = self.place.names(self.folder)
        stems = (name[: -len(SUFFIX)] for name in names if name.endswith(SUFFIX))
        ordinals = sorted(
            int(stem) for stem in stems if stem.isascii() and stem.isdecimal() and stem == _digits(int(stem))
        )
        return ordinals, END_MARKER in names

    def chunk(self, ordinal: int) -> Chunk:
        """Raises FileNotFoundError, or LogCorrupt unless it is whole."""
        return parse(self.place.get(self.path(ordinal)), self.where(ordinal), self.job, self.name, ordinal)

    def header(self, ordinal: int) -> Header:
        data = self.place.head(self.path(ordinal), header_bytes())
        return parse_header(data, self.where(ordinal), CHUNK, self.job, self.name, ordinal)

    def end(self) -> Header | None:
        """The end marker; its ordinal is the number of chunks, its count that of the records."""
        try:
            data = self.place.get(self.end_path)
        except FileNotFoundError:
            return None
        return parse_header(data, f"End marker ({self.place.where(self.end_path)})", END, self.job, self.name, None)

    def locate(self, ordinals: list[int], seq: int) -> int:
        """The index of the chunk that has ``seq``: the last one that starts at or before it, else the first one."""
        try:
            return self._bisect(ordinals, seq)
        except LogCorrupt:  # a damaged header on the way, perhaps of a chunk that nobody needs
            for index in range(len(ordinals) - 1, 0, -1):
                try:
                    if self.header(ordinals[index]).first_seq <= seq:
                        return index
                except LogCorrupt:
                    continue
            return 0

    def _bisect(self, ordinals: list[int], seq: int) -> int:
        low, high = 0, len(ordinals)
        if seq <= 1:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            if self.header(ordinals[middle]).first_seq <= seq:
                low = middle
            else:
                high = middle
        return low
