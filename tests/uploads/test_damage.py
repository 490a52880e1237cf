"""What is damaged or missing in a global store is found and named."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path

import pytest
from uploads.logs import JOB, NAME, objects, overwrite, records, upload
from uploads.upload_worker import record

from ftcomm.errors import ConfigError, LogCorrupt, Unsupported
from ftcomm.recovery import chunks, places
from ftcomm.recovery.global_store import LogRecord, LogUploader, fetch, remove


def test_a_damaged_record_is_named(url: str) -> None:
    upload(url)
    name = "00000002.ftlog"
    data = bytearray(objects(url)[name])
    header = chunks.parse_header(bytes(data), "", chunks.CHUNK, JOB, NAME, 2)
    second = header.first_seq + 1
    at = bytes(data).index(bytes(record(second).payload))
    data[at + 50] ^= 1
    overwrite(url, name, bytes(data))
    fetched = fetch(url, JOB, NAME)
    assert list(itertools.islice(fetched, header.first_seq - 1)) == records(1, header.first_seq - 1)
    with pytest.raises(LogCorrupt, match=rf"Chunk 2 \(.*{name}\): record {second}, number 2 in the chunk, fails"):
        next(fetched)


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    upload(str(tmp_path), 1, 3)
    data = objects(str(tmp_path))["00000000.ftlog"]
    assert list(chunks.parse(data, "it", JOB, NAME, 0).records()) == records(1, 3)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises((LogCorrupt, Unsupported)):
            chunks.parse(bytes(damaged), "it", JOB, NAME, 0)
        with pytest.raises(LogCorrupt):
            chunks.parse(data[:at], "it", JOB, NAME, 0)
    with pytest.raises(LogCorrupt):
        chunks.parse(data + b"\0", "it", JOB, NAME, 0)


def test_a_damaged_end_marker(url: str) -> None:
    upload(url)
    overwrite(url, "end.ftlog", objects(url)["end.ftlog"][:-1] + b"?")
    with pytest.raises(LogCorrupt, match=r"End marker \(.*end.ftlog\): the header fails its check"):
        list(fetch(url, JOB, NAME, follow=True))


def test_bytes_after_the_end_marker(url: str) -> None:
    """Not that another uploader writes the same log."""
    upload(url)
    overwrite(url, "end.ftlog", objects(url)["end.ftlog"] + b"?")
    with pytest.raises(LogCorrupt, match=r"End marker \(.*end.ftlog\) has 89 bytes, and its header 88"):
        list(fetch(url, JOB, NAME))
    with pytest.raises(LogCorrupt, match="End marker"):
        LogUploader(url, JOB, NAME)


@pytest.mark.parametrize(
    "name", ["7.ftlog", "000000000.ftlog", "٠٠٠٠٠٠٠٤.ftlog", "0000000a.ftlog", "00000003.ftlog.old"]
)
def test_other_files_are_no_chunks(tmp_path: Path, name: str) -> None:
    url = str(tmp_path)
    upload(url)
    overwrite(url, name, b"?")
    assert list(fetch(url, JOB, NAME)) == records(1, 20)
    LogUploader(url, JOB, NAME).close()


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_a_missing_chunk_is_named(url: str, follow: bool, ended: bool) -> None:
    upload(url)
    place = places.open_place(url)
    place.delete(f"{JOB}/{NAME}/00000002.ftlog")
    if not ended:
        place.delete(f"{JOB}/{NAME}/end.ftlog")
    with pytest.raises(LogCorrupt, match=r"Chunk 2 \(.*00000002.ftlog\) is missing, with the records after \d+"):
        list(fetch(url, JOB, NAME, follow=follow))


@pytest.mark.parametrize("follow", [False, True])
def test_a_missing_last_chunk_is_named(url: str, follow: bool) -> None:
    upload(url)
    last = sorted(objects(url))[-2]
    places.open_place(url).delete(f"{JOB}/{NAME}/{last}")
    with pytest.raises(
        LogCorrupt, match=rf"{last}\) is missing.*the end marker is there, which says . chunks and 20 records"
    ):
        list(fetch(url, JOB, NAME, follow=follow))


def test_chunks_beyond_the_end(tmp_path: Path) -> None:
    upload(str(tmp_path), 1, 3)
    end = objects(str(tmp_path))["end.ftlog"]
    remove(str(tmp_path), JOB)
    upload(str(tmp_path))
    overwrite(str(tmp_path), "end.ftlog", end)
    with pytest.raises(LogCorrupt, match="which says 1 chunks and 3 records up to 3"):
        list(fetch(str(tmp_path), JOB, NAME))
    with pytest.raises(LogCorrupt, match="end marker for 1 chunks"):
        LogUploader(str(tmp_path), JOB, NAME)


def test_a_chunk_of_another_job(url: str) -> None:
    upload(url)
    upload(url, job="job-2")
    overwrite(url, "00000001.ftlog", objects(url, "job-2")["00000001.ftlog"])
    with pytest.raises(
        ConfigError, match="Chunk 1 .* belongs to the log '0-to-1' of job 'job-2', not to '0-to-1' of 'job-1'"
    ):
        list(fetch(url, JOB, NAME))


def test_a_chunk_of_another_place_in_the_log(url: str) -> None:
    upload(url)
    overwrite(url, "00000001.ftlog", objects(url)["00000002.ftlog"])
    with pytest.raises(LogCorrupt, match="Chunk 1 .* holds chunk 2"):
        list(fetch(url, JOB, NAME))


def test_chunks_that_do_not_follow_each_other(tmp_path: Path) -> None:
    """Two uploaders on a store that can't refuse the second one."""
    upload(str(tmp_path), 1, 6)
    other = chunks.Header(chunks.CHUNK, JOB, NAME, 1, 4, 1, 6, 6)
    overwrite(str(tmp_path), "00000001.ftlog", chunks.encode(other, [chunks.pack_record(record(6))]))
    with pytest.raises(LogCorrupt, match="Chunk 1 .* begins with record 6, but the chunk before it ends with 3"):
        list(fetch(str(tmp_path), JOB, NAME))


def test_a_newer_version(url: str) -> None:
    upload(url)
    data = objects(url)["00000001.ftlog"]
    overwrite(url, "00000001.ftlog", data[:4] + b"\x02\x00" + data[6:])
    with pytest.raises(Unsupported, match="Chunk 1 .* has format version 2; this ftcomm reads up to 1"):
        list(fetch(url, JOB, NAME))
    with pytest.raises(ConfigError, match="There is no log 'x' .* there: 0-to-1"):
        list(fetch(url, JOB, "x"))


def test_damage_before_the_first_record_needed_does_no_harm(tmp_path: Path) -> None:
    upload(str(tmp_path), 1, 40)
    for number in range(8):  # the search for the record looks at the last of them
        overwrite(str(tmp_path), f"{number:08d}.ftlog", b"nothing")
    assert list(fetch(str(tmp_path), JOB, NAME, from_seq=30)) == records(30, 40)


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    """The bytes of docs/global-store.md, by hand."""
    with LogUploader(str(tmp_path), "j", "nm") as log:
        log.append(LogRecord(5, 1, 2, 3, 4, b"abc"))
    body = b"".join(n.to_bytes(8, "little") for n in (5, 1, 2, 3, 4, 3)) + b"abc"
    body = zlib.crc32(body).to_bytes(4, "little") + bytes(4) + body + bytes(5)
    numbers = b"".join(n.to_bytes(8, "little") for n in (0, 0, 1, 5, 5, len(body)))
    header = b"FTLG" + bytes([1, 0, 1, 0, 80, 0, 0, 0, 1, 0, 2, 0]) + numbers + zlib.crc32(body).to_bytes(4, "little")
    header = (header + b"jnm").ljust(76, b"\0")
    expected = header + zlib.crc32(header).to_bytes(4, "little") + body
    assert objects(str(tmp_path), "j", "nm")["00000000.ftlog"] == expected
