"""``ftcomm tune``: from which sizes on this machine's all-reduces are better done by another algorithm.

Starts local ranks (``_tune_rank.py``, one process each), measures the algorithms against each other, and prints the environment
variables that set the borders between them. Nothing is chosen by measuring while a job runs: the algorithms add in different
orders, and the bits of a sum of floats must not depend on how fast the machine was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ftcomm import __version__
from ftcomm.errors import SystemFailure
from ftcomm.launch.parent import die_with_launcher
from ftcomm.options import parse_size

SIZES = tuple(1 << power for power in (*range(10, 17), *range(19, 27)))  # bytes: 1 KiB to 64 KiB, 512 KiB to 64 MiB
LEAST_LOAD = 0.1  # processors that others use: from here on it is told
LEAST_GAIN = 0.05  # of the time at one size: less is within what two runs differ by
MAX_RANKS, MAX_SIZE = 256, 1 << 30
NEVER = 1 << 40  # a border beyond every size: the largest that the variables take
_COLUMNS = {"flat": "small-message", "ring": "ring", "auto": "reading"}  # by the name that all_reduce knows


@dataclass(frozen=True)
class Comparison:
    """Two algorithms, the first for smaller sizes than the second, and the variable with the border between them."""

    variable: str
    algorithms: tuple[str, str]
    last: bool  # the variable has the largest size of the first algorithm; else the smallest of the second


FLAT = Comparison("FTCOMM_FLAT_LIMIT", ("flat", "ring"), last=True)
READING = Comparison("FTCOMM_REDUCE_PULL_LIMIT", ("ring", "auto"), last=False)  # "auto" reads: see _tune_rank.py
Times = Mapping[int, tuple[float, float]]  # size in bytes -> seconds of the first algorithm and of the second


def default_border(comparison: Comparison, ranks: int, streams: bool = False, crowded: bool = False) -> int:
    """The built-in border, in bytes (``communicator.cc``, ``operations.cc``).

    Args:
        streams: links of this machine are written past the caches (``FTCOMM_STREAM_LIMIT``, ``streams`` in ``stats()``).
        crowded: ranks share the processors of this machine (``crowded`` in ``stats()``).
    """
    if comparison is READING:
        return NEVER if streams and ranks <= 4 else 4 << 20
    if crowded:
        return 65536 if ranks not in (3, 4) else 32768
    return 65536 if ranks <= 2 else 32768 if ranks == 3 else 16384


def choose_border(times: Times, default: int, last: bool) -> int:
    """The border, in bytes, with the least total of log-time over all sizes, or ``default``.

    ``default`` is kept where nothing else is better in total, or where no size between the two borders gains over 5 %.

    Args:
        times: see Times; empty: the default is kept.
        last: see Comparison.
    """
    sizes = sorted(times)

    def cost(count: int) -> float:  # of the first algorithm for so many sizes, over that of the second for all
        return math.fsum(math.log(times[size][0] / times[size][1]) for size in sizes[:count])

    kept = sum(size <= default if last else size < default for size in sizes)
    count = min(range(len(sizes) + 1), key=lambda count: (cost(count), abs(count - kept)))
    after, before = (0, 1) if count > kept else (1, 0)
    moved = [times[size] for size in sizes[min(count, kept) : max(count, kept)]]
    if not any(1 - pair[after] / pair[before] > LEAST_GAIN for pair in moved):
        return default
    if last:
        return sizes[count - 1] if count > 0 else sizes[0] - 1
    return sizes[count] if count < len(sizes) else sizes[-1] + 1


def environment_lines(report: Mapping[str, Any]) -> list[str]:
    """What a shell sources before it starts the ranks. A variable that was not measured is left as it is."""
    lines = [
        f"# ftcomm tune: {report['machine']}, {report['ranks']} ranks, ftcomm {report['ftcomm']}, {report['date']}",
    ]
    if report["others"] > LEAST_LOAD:
        lines.append(f"# other programs used {report['others']:.2f} processors meanwhile: measure again without them")
    for variable, border in report["borders"].items():
        default = report["defaults"][variable]
        # Of a crowded machine it is another one on several hosts, and under replay.
        here_alone = variable == FLAT.variable and report["crowded"]
        if border is None:
            lines.append(f"# {variable}: not measured")
        elif border == default and not here_alone:
            lines.append(
                f"export {variable}=0  # the built-in default, {'never' if default == NEVER else f'{default} bytes'}"
            )
        else:
            lines.append(f"export {variable}={border}")
    return lines


# -- all ranks -----------------------------------------------------------------------------------------------------


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt: the ranks are ended on the way out."""

    def leave(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(rank: subprocess.Popen[bytes]) -> None:
    rank.kill()
    rank.wait()


def measure(ranks: int, sizes: Sequence[int], rounds: int, found: Callable[[dict[str, Any]], None]) -> None:
    """Calls ``found`` with what rank 0 tells, see ``_tune_rank.py``. However it ends, no rank is left.

    Raises:
        SystemFailure: a rank died or failed; the text has what it wrote.
    """
    with ExitStack() as stack:
        stack.enter_context(_ends_in_order())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ftcomm-tune-", ignore_cleanup_errors=True))
        plan = {"ranks": ranks, "sizes": sizes, "rounds": rounds, "folder": folder}
        pipes = stack.enter_context(selectors.DefaultSelector())
        processes: list[subprocess.Popen[bytes]] = []
        logs: list[IO[bytes]] = []
        for rank in range(ranks):
            logs.append(stack.enter_context(open(f"{folder}/{rank}.log", "w+b")))
            command = [sys.executable, "-m", "ftcomm._tune_rank", json.dumps({**plan, "rank": rank})]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=logs[-1],
                preexec_fn=die_with_launcher(),  # noqa: PLW1509 - two system calls, no lock
            )
            processes.append(process)
            stack.callback(_end, process)
            assert process.stdout is not None
            pipes.register(stack.enter_context(process.stdout), selectors.EVENT_READ, process)
        text = b""  # of rank 0, the only one that writes; for the others the pipe's end tells that they have ended
        while pipes.get_map():
            for key, _ in pipes.select():
                data = os.read(key.fd, 65536)
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    found(json.loads(line))
                if not data:
                    pipes.unregister(key.fileobj)
                    if key.data.wait() != 0:
                        _fail(processes, logs)


def _fail(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[IO[bytes]]) -> None:
    """Of the ranks that have failed, names one that was killed: the others may only have seen that."""
    codes = {rank: code for rank, process in enumerate(processes) if (code := process.poll())}
    rank, code = min(codes.items(), key=lambda ended: ended[1])  # a signal is a negative code
    logs[rank].seek(0)
    said = logs[rank].read()[-2000:].decode(errors="replace").strip()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    raise SystemFailure(
        f"Rank {rank} {how}, so nothing was chosen." + (f" It said: {said}" if said else ""), ranks=[rank]
    )


# -- the command ---------------------------------------------------------------------------------------------------


class _Table:
    """Prints a row as soon as it is measured."""

    def __init__(self) -> None:
        self._variable = ""

    def row(self, found: Mapping[str, Any]) -> None:
        if "streams" in found:
            return
        if "not_read" in found:
            print(f"\nReading is not measured: {found['not_read']}")
            return
        names = [_COLUMNS[name] for name in found["seconds"]]
        if found["variable"] != self._variable:
            self._variable = found["variable"]
            print(f"\n{'bytes':>10} {names[0]:>14} {names[1]:>14}   fastest")
        times = " ".join(f"{1e6 * seconds:14.2f}" for seconds in found["seconds"].values())
        print(f"{found['bytes']:10} {times}   {_COLUMNS[found['fastest']]}", flush=True)


def _used() -> tuple[float, float]:
    """Seconds of processor time: of all programs since the machine started, and of this one with the ranks that have ended."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:8])  # without idle and iowait
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def tune(ranks: int, sizes: Sequence[int], rounds: int, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures and chooses; calls ``show`` with each row. The report is what ``--json`` prints."""
    report: dict[str, Any] = {
        "ftcomm": __version__,
        "machine": f"{platform.node()} ({platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} processors)",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "ranks": ranks,
        "rounds": rounds,
        "rows": [],
        "not_read": None,  # or why there is no reading
        "streams": False,  # see default_border
        "crowded": False,
        "max_payload": 65536,
    }

    def found(what: dict[str, Any]) -> None:
        if "seconds" in what:
            what["fastest"] = min(what["seconds"], key=what["seconds"].get)
            report["rows"].append(what)
        else:
            report.update(what)
        show(what)

    start, before = time.monotonic(), _used()
    measure(ranks, sizes, rounds, found)
    everybody, own = (now - then for now, then in zip(_used(), before, strict=True))
    report["others"] = max(0.0, everybody - own) / (time.monotonic() - start)  # processors
    report["defaults"] = {
        c.variable: default_border(c, ranks, report["streams"], report["crowded"]) for c in (FLAT, READING)
    }
    report["defaults"][FLAT.variable] = min(report["defaults"][FLAT.variable], report["max_payload"])
    report["borders"] = {}
    for c in (FLAT, READING):
        times = {r["bytes"]: tuple(r["seconds"].values()) for r in report["rows"] if r["variable"] == c.variable}
        measured = times and not (c is READING and report["not_read"])
        border = choose_border(times, report["defaults"][c.variable], c.last) if measured else None
        report["borders"][c.variable] = border
    report["lines"] = environment_lines(report)
    return report


def _size(text: str) -> int:
    """Bytes, of whole floats: ``65536``, ``64K``, ``64KiB``, ``1M``."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if size % 4 or not 4 <= size <= MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r}: give a multiple of 4 bytes, from 4 bytes to 1 GiB")
    return size


def _between(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: give a number from {least} to {most}")
        return int(text)

    return number


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="ftcomm tune",
        description="Measures all-reduces of float32 sums on this machine, which should do nothing else, and prints from "
        "which sizes on another algorithm is faster, as environment variables for all ranks of a job.",
    )
    parser.add_argument(
        "--ranks", type=_between(2, MAX_RANKS), required=True, metavar="N", help="as the job will have here"
    )
    parser.add_argument("--sizes", type=_size, nargs="+", default=SIZES, metavar="BYTES", help="for example 4K 64K 1M")
    parser.add_argument(
        "--rounds", type=_between(1, 10_000), default=9, metavar="R", help="of which medians are taken (9)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the variables there, for a shell to source")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if not args.json:
        print(f"All-reduce of float32 sums, {args.ranks} ranks: microseconds per call, medians of {args.rounds} rounds")
    try:
        report = tune(args.ranks, sorted(set(args.sizes)), args.rounds, (lambda _: None) if args.json else _Table().row)
        print(json.dumps(report, indent=2) if args.json else "\n" + "\n".join(report["lines"]))
        if args.output is not None:
            args.output.write_text("\n".join(report["lines"]) + "\n", encoding="utf-8")
    except BrokenPipeError:  # nobody reads the output: ftcomm.cli's
        raise
    except OSError as error:
        print(f"ftcomm tune: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ftcomm tune: interrupted, nothing was chosen", file=sys.stderr)
        return 130
    return 0
