"""All benchmarks one after another: their tables, figures and pictures in one folder.

A machine that does nothing else needs some hours for it; `--only` takes some, and `--quick` does little of each, to see that
all of them work on this machine: its figures are worth nothing. One that fails is said at the end, and the others go on.

    python benchmarks/run_all.py --list
    python benchmarks/run_all.py results
    python benchmarks/run_all.py results --only all_reduce-2 all_reduce-4 recovery
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from suite import summary
from suite.operations import BUS

from ftcomm.launch.parent import die_with_launcher

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Item:
    """One command of docs/: `quick` are the arguments that make it short, `files` the outputs that it can write."""

    name: str
    program: str
    args: str = ""
    quick: str = ""
    files: tuple[str, ...] = ()

    def command(self, folder: Path, short: bool) -> list[str]:
        written = [part for kind in self.files for part in (f"--{kind}", str(folder / f"{self.name}.{_ENDINGS[kind]}"))]
        more = shlex.split(self.quick) if short else []
        return [sys.executable, str(HERE / f"{self.program}.py"), *shlex.split(self.args), *more, *written]


_ENDINGS = {"json": "json", "csv": "csv", "plot": "svg"}
_SUITE = ("json", "csv", "plot")
_DRAWN = ("json", "plot")

ITEMS = (
    *(
        Item(f"{kind}-{n}", kind, f"--ranks {n}", "--sizes 8,64K --rounds 3 --no-limit", _SUITE)
        for kind in BUS
        for n in (2, 3, 4, 8)
    ),
    *(
        Item(
            f"between_hosts-{n}",
            "between_hosts",
            f"--ranks-per-host {n}",
            "--rate none,1G --delay 0,1ms --sizes 8,64K --rounds 1 --iperf-seconds 1",
            _SUITE,
        )
        for n in (1, 2)
    ),
    *(Item(f"healthy-{n}", "healthy", f"--ranks {n}", "--rounds 1", ("json",)) for n in (2, 4)),
    *(
        Item(f"ddp_step-{n}", "ddp_step", f"--ranks {n}", "--model resnet --batch 4 --rounds 1", ("json",))
        for n in (2, 4)
    ),
    Item("fault_tolerance_cost", "fault_tolerance_cost", "", "--ranks 2 --sizes 8,256K --rounds 3", _DRAWN),
    Item("recovery", "recovery", "--ranks 2,4,8 --sizes 4K,4M,64M", "--kills 1 --ranks 2 --sizes 4K,4M", _DRAWN),
    Item("recovery-hosts", "recovery", "--hosts 2 --memory-mib 1024 --workers 2", "--kills 1", _DRAWN),
    Item("recovery-tcp", "recovery", "--transport tcp --memory-mib 1024 --workers 2", "--kills 1", _DRAWN),
    Item("state_transfer", "state_transfer", "", "--sizes 4 --rounds 1"),
    Item("logging_cost", "logging_cost", "", "--sizes 1024 --rounds 1", ("json",)),
    Item(
        "logging_cost-tcp",
        "logging_cost",
        "--transport tcp --ranks 2 --only send",
        "--sizes 1024 --rounds 1",
        ("json",),
    ),
    Item("durable_log", "durable_log", "", "--rounds 1 --messages 10"),
    Item("pipeline_logging", "pipeline_logging", "", "--rounds 1 --iterations 2 --sizes 65536", ("json",)),
    Item("replay_recovery", "replay_recovery", "", "--stages 2 --lost 2 --rounds 1 --victims first", _DRAWN),
    Item("twin_recovery", "twin_recovery", "", "--lost 2 --rounds 1", ("json",)),
    Item("parallel_recovery", "parallel_recovery", "", "--quick", _DRAWN),
    Item("strategies", "strategies", "", "--quick", _DRAWN),
    Item("engine_recovery", "engine_recovery", "", "--quick", _DRAWN),
    Item("engine_accuracy", "engine_accuracy", "", "--quick", _DRAWN),
    Item("undo_cost", "undo_cost", "", "--rounds 1"),
    Item("undo_error", "undo_error", "", "--cases 10"),
    Item("undo_accuracy", "undo_accuracy", "", "--seeds 1 --failures 1", _DRAWN),
    Item("scale", "scale", "", "--ranks 4 --rounds 1 --calls 2 --sim 32 2000 --links-us 10", _DRAWN),
    Item("grouping", "grouping", "", "--instances 10"),
)


def main() -> int:
    args = _arguments()
    items = _chosen(args.only)
    if args.list:
        for item in items:
            print(f"{item.name:18} python benchmarks/{item.program}.py {item.args}".rstrip())
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, item in enumerate(items, 1):
        print(f"[{number}/{len(items)}] {item.name} ...", end="", flush=True)
        began = time.monotonic()
        ended = _run(item, args.folder, args.quick)
        print(f" {time.monotonic() - began:.0f} s{'' if ended == 0 else f', FAILED ({ended})'}", flush=True)
        if ended != 0:
            failed.append(item)
    for item in failed:
        print(f"\n{item.name} failed; the end of {args.folder / item.name}.txt:")
        for line in (args.folder / f"{item.name}.txt").read_text(encoding="utf-8").splitlines()[-8:]:
            print(f"    {line}")
    if collectives := summary.write(args.folder):
        print(f"\nThe collectives beside their peers, in one document: {collectives}")
    print(f"\n{len(items) - len(failed)} of {len(items)} benchmarks: tables and figures are in {args.folder}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    names = "names as --list prints them, or patterns: 'all_*'"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("results"), help="where to write (default: results)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help=names)
    parser.add_argument("--quick", action="store_true", help="little of each: does everything work?")
    parser.add_argument("--list", action="store_true", help="print names and commands, and do nothing")
    return parser.parse_args()


def _chosen(patterns: list[str] | None) -> list[Item]:
    if patterns is None:
        return list(ITEMS)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(item.name, pattern) for item in ITEMS):
            sys.exit(f"There is no benchmark {pattern!r}. There are: {', '.join(item.name for item in ITEMS)}.")
    return [item for item in ITEMS if any(fnmatch.fnmatchcase(item.name, pattern) for pattern in patterns)]


def _run(item: Item, folder: Path, short: bool) -> int:
    """Its exit status. What it prints goes into a file, below the command that a reader would type."""
    command = item.command(folder, short)
    with (folder / f"{item.name}.txt").open("w", encoding="utf-8") as out:
        typed = shlex.join([Path(command[0]).name, f"benchmarks/{item.program}.py", *command[2:]])
        out.write(f"$ {typed}\n# load before: {os.getloadavg()[0]:.2f}\n")
        out.flush()
        told = die_with_launcher(signal.SIGTERM)
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, preexec_fn=told)  # noqa: PLW1509
        try:
            return process.wait()
        except BaseException:  # Ctrl-C, of which the terminal has told it, too; or SIGTERM, which came here only
            process.terminate()
            process.wait()
            raise


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
