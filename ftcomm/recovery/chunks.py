"""The bytes of a log in the global store: chunks of records, and the marker that ends a log (docs/global-store.md)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftcomm.errors import ConfigError, LogCorrupt, Unsupported

__all__ = [
    "CHUNK",
    "END",
    "Chunk",
    "Header",
    "LogRecord",
    "encode",
    "pack_record",
    "parse",
    "parse_header",
    "record_size",
]

VERSION = 1
CHUNK, END = 1, 2
_MAGIC = b"FTLG"
# magic, version, kind, header size, job length, name length, ordinal, records before, records, first, last, body size, body crc
_HEADER = struct.Struct("<4sHHIHHQQQQQQI")
_VERSION_AT = struct.Struct("<4sH")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<IIQqqqqQ")  # crc of the rest, 0, seq, tag, aux, step, micro_batch, payload size
_MOST_OF_HEADER = 2048  # names have at most 200 characters


@dataclass(frozen=True)
class LogRecord:
    """One message of a log. ``payload`` is any buffer; of a fetched record a read-only view into its chunk.

    Attributes:
        seq: its number in the log; each record has the number after the one before it.
        tag: the message's tag.
        aux: a number for the log's owner.
        step: training step in which it was sent.
        micro_batch: micro-batch that it belongs to.
        payload: its bytes.
    """

    seq: int
    tag: int
    aux: int
    step: int
    micro_batch: int
    payload: Any  # bytes, bytearray, memoryview, a NumPy array, ...


@dataclass(frozen=True)
class Header:
    """What a chunk (or the end marker) says of itself. ``before`` counts the records of the chunks before it."""

    kind: int
    job: str
    name: str
    ordinal: int
    before: int
    count: int
    first_seq: int
    last_seq: int
    body_size: int = 0
    body_crc: int = 0

    def pack(self) -> bytes:
        job, name = self.job.encode(), self.name.encode()
        size = _aligned(_HEADER.size + len(job) + len(name) + _CRC.size)
        fixed = _HEADER.pack(
            _MAGIC, VERSION, self.kind, size, len(job), len(name), self.ordinal, self.before, self.count,
            self.first_seq, self.last_seq, self.body_size, self.body_crc,
        )  # fmt: skip
        covered = (fixed + job + name).ljust(size - _CRC.size, b"\0")
        return covered + _CRC.pack(zlib.crc32(covered))


@dataclass(frozen=True)
class Chunk:
    """A chunk whose checksums are right."""

    header: Header
    body: memoryview
    where: str

    def records(self) -> Iterator[LogRecord]:
        at = 0
        for number in range(self.header.count):
            record, at = _record(self.body, at, self.header.first_seq + number, self.where, number)
            yield record
        if at != len(self.body):
            raise LogCorrupt(f"{self.where} has {len(self.body) - at} bytes after its last record; {_HELP}")


_HELP = "it was damaged in the store. Restore it from a copy, or recover from a checkpoint instead."


def _aligned(size: int) -> int:
    return (size + 7) & ~7


def record_size(length: int) -> int:
    """Bytes that a record with a payload of ``length`` takes in a chunk."""
    return _RECORD.size + _aligned(length)


def pack_record(record: LogRecord) -> tuple[bytes, bytes]:
    """The fixed part of a record (its checksum still 0) and a copy of its payload."""
    if not isinstance(record, LogRecord):
        raise ConfigError(f"A log has LogRecords, and this is {record!r}.")
    try:
        payload = record.payload if isinstance(record.payload, bytes) else memoryview(record.payload).tobytes()
        fixed = _RECORD.pack(
            0, 0, record.seq, record.tag, record.aux, record.step, record.micro_batch, len(payload)
        )  # fmt: skip
    except (struct.error, TypeError, ValueError) as error:
        raise ConfigError(
            f"Record {record.seq!r} can't be logged ({error}). Its numbers must be integers of at most 64 bits, seq "
            "at least 1, and its payload a buffer."
        ) from None
    return fixed, payload


def encode(header: Header, records: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A chunk of packed records; fills in the header's size and checksum."""
    pieces: list[bytes] = [b""]
    crc = 0
    for fixed, payload in records:
        checksum = zlib.crc32(payload, zlib.crc32(memoryview(fixed)[8:]))
        for piece in (_CRC.pack(checksum) + fixed[4:], payload, bytes(-len(payload) % 8)):
            crc = zlib.crc32(piece, crc)
            pieces.append(piece)
    size = sum(map(len, pieces))
    pieces[0] = replace(header, body_size=size, body_crc=crc).pack()
    return b"".join(pieces)


def header_bytes() -> int:
    """As many bytes from the start of a chunk always hold its whole header."""
    return _MOST_OF_HEADER


def parse_header(data: bytes | memoryview, where: str, kind: int, job: str, name: str, ordinal: int | None) -> Header:
    """The header of the object ``where``, which should be this part of this log."""
    size, header = _header(data, where)
    if header.job != job or header.name != name:
        raise ConfigError(
            f"{where} belongs to the log {header.name!r} of job {header.job!r}, not to {name!r} of {job!r}: files of "
            "several jobs were mixed. Give each job its own name and folder, and never copy logs between them."
        )
    if header.kind != kind or (ordinal is not None and header.ordinal != ordinal):
        is_ = "an end marker" if header.kind == END else f"chunk {header.ordinal}"
        raise LogCorrupt(f"{where} holds {is_}: the object was renamed or copied over another one; {_HELP}")
    if kind == END and len(data) != size:
        raise LogCorrupt(f"{where} has {len(data)} bytes, and its header {size}; {_HELP}")
    return header


def parse(data: bytes, where: str, job: str, name: str, ordinal: int) -> Chunk:
    """The chunk in ``data`` after all checks; a wrong one is LogCorrupt, which names the record if it can."""
    header = parse_header(data, where, CHUNK, job, name, ordinal)
    body = memoryview(data)[_header(data, where)[0] :]
    if len(body) == header.body_size and zlib.crc32(body) == header.body_crc:
        return Chunk(header, body, where)
    at = 0
    for number in range(header.count):  # which record?
        _record(body, at, header.first_seq + number, where, number, check=True)
        at += record_size(_RECORD.unpack_from(body, at)[-1])
    raise LogCorrupt(
        f"{where}: all {header.count} records are whole, but not what surrounds them ({len(body)} bytes, written were "
        f"{header.body_size}); {_HELP}"
    )


def _header(data: bytes | memoryview, where: str) -> tuple[int, Header]:
    if len(data) >= _VERSION_AT.size:
        magic, version = _VERSION_AT.unpack_from(data)
        if magic == _MAGIC and version > VERSION:
            raise Unsupported(
                f"{where} has format version {version}; this ftcomm reads up to {VERSION}. Read it with the ftcomm "
                "that wrote it, or a newer one (if there is none, the object is damaged)."
            )
        if magic != _MAGIC:
            raise LogCorrupt(
                f"{where} is not a chunk of an ftcomm log, or its header is damaged: it starts with {magic!r}."
            )
    if len(data) < _HEADER.size:
        raise LogCorrupt(f"{where} has {len(data)} bytes, less than a header; {_HELP}")
    _magic, _version, kind, size, job_size, name_size, *numbers = _HEADER.unpack_from(data)
    covered = memoryview(data)[: size - _CRC.size] if _HEADER.size + job_size + name_size + _CRC.size <= size else b""
    if len(data) < size or not covered or zlib.crc32(covered) != _CRC.unpack_from(data, size - _CRC.size)[0]:
        raise LogCorrupt(f"{where}: the header fails its check; {_HELP}")
    at = _HEADER.size
    job = str(covered[at : at + job_size], "utf-8")
    name = str(covered[at + job_size : at + job_size + name_size], "utf-8")
    return size, Header(kind, job, name, *numbers)


def _record(body: memoryview, at: int, seq: int, where: str, number: int, check: bool = False) -> tuple[LogRecord, int]:
    what = f"{where}: record {seq}, number {number + 1} in the chunk,"
    if at + _RECORD.size > len(body):
        raise LogCorrupt(f"{what} is cut off; {_HELP}")
    crc, _zero, found, tag, aux, step, micro_batch, size = _RECORD.unpack_from(body, at)
    end = at + _RECORD.size + size
    if end > len(body):
        raise LogCorrupt(f"{what} is cut off or its size is damaged; {_HELP}")
    if check and zlib.crc32(body[at + 8 : end]) != crc:
        raise LogCorrupt(f"{what} fails its check; {_HELP}")
    if found != seq:
        raise LogCorrupt(f"{what} says that it is record {found}; {_HELP}")
    return LogRecord(found, tag, aux, step, micro_batch, body[at + _RECORD.size : end]), at + record_size(size)
