"""An uploader in a process of its own that does what each line on its input says: upload_worker.py URL JOB NAME CHUNK_BYTES.

``append N`` appends the next N records; ``flush``, ``close``; ``die N`` appends N records and is killed when the first chunk of
them is written but not yet seen. It answers each with a line.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from ftcomm.recovery.global_store import LogRecord, LogUploader


def record(seq: int, size: int = 100) -> LogRecord:
    """The same bytes for the same number, in every process."""
    return LogRecord(seq, 7, -seq, seq // 4, seq % 4, bytes((seq * 31 + i) & 0xFF for i in range(size + seq % 5)))


def die_instead(*_args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    url, job, name, chunk_bytes = sys.argv[1:]
    uploader = LogUploader(url, job, name, chunk_bytes=int(chunk_bytes))
    seq = uploader.next_seq or 1
    print("next", seq, flush=True)
    for line in sys.stdin:
        command, _, number = line.strip().partition(" ")
        if command == "die":
            os.link = os.rename = die_instead  # type: ignore[assignment]
        if command in ("append", "die"):
            for _ in range(int(number)):
                uploader.append(record(seq))
                seq += 1
            if command == "die":
                uploader.flush()
        elif command == "flush":
            uploader.flush()
        else:
            uploader.close()
        print("done", command, flush=True)


if __name__ == "__main__":
    main()
