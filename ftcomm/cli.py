"""The command ``ftcomm``."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ftcomm import __version__
from ftcomm._lib import lib, library_path, native_path
from ftcomm.errors import ConfigError, Error

__all__ = ["main"]

_UNREAD = 128 + signal.SIGPIPE  # as the shell says it of other tools


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the exit code is 0, 1 for an error that is printed, 2 for wrong arguments, 141 if nobody reads on."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it ends
        return _UNREAD


def _nobody_reads() -> bool:
    """Whether the other end of our output has gone, as ``head`` goes when it has enough."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    return bool(poller.poll(0))


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["sim"]:  # all its arguments are the simulator's own
        return _reported(_sim, arguments[1:])
    if arguments[:1] == ["timeline"]:
        return _reported(_timeline, arguments[1:])
    if arguments[:1] == ["tune"]:
        return _reported(_tune, arguments[1:])
    if arguments[:1] == ["store"]:
        return _reported(_store, arguments[1:])
    parser = argparse.ArgumentParser(prog="ftcomm", description="Looks at ftcomm: what it is built for, and its tools.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == "clean":
            command.add_argument(
                "folder", nargs="*", help="where ftrun --pair-log DIR made logs; /dev/shm is looked at anyway"
            )
        if name in ("info", "faults"):
            command.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser(
        "sim", help="run the protocol's simulator: ftcomm sim --seeds N [--seed N] [--mutate RULE], or --scale N"
    )
    commands.add_parser(
        "timeline", help="draw who was alive, waiting, recovering: ftcomm timeline run/events.jsonl -o run.png"
    )
    commands.add_parser(
        "tune",
        help="find the fastest all-reduce for each size on this machine: ftcomm tune --ranks 4 --output tuned.sh",
    )
    commands.add_parser(
        "store",
        help="keep the stores of jobs on several nodes, on a host that stays, so that no node has to: ftcomm store --port 29400",
    )
    chosen = parser.parse_args(arguments)
    return _reported(_COMMANDS[chosen.command][0], chosen)


def _reported(run, what) -> int:  # type: ignore[no-untyped-def]
    try:
        return int(run(what) or 0)
    except Error as error:
        print(f"ftcomm: {error}", file=sys.stderr)
        return 1


def _info(chosen: argparse.Namespace) -> None:
    ffi, C = lib()
    facts = {
        "ftcomm": __version__,
        "library": library_path(),
        "version": ffi.string(C.ft_version()).decode(),
        **json.loads(ffi.string(C.ft_build_info()).decode()),
        "torch": _torch(),
    }
    if chosen.json:
        print(json.dumps(facts, indent=2))
        return
    host = facts.pop("host")
    for name, value in {**facts, **host}.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name.replace('_', ' '):24} {text}")


def _torch() -> str:
    """The torch that the backend was built for and the one that is installed, without importing torch."""
    from importlib import metadata

    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        installed = "not installed"
    try:
        with open(native_path("torch_version.txt"), encoding="utf-8") as file:
            return f"built for {file.read().strip()}, installed {installed}"
    except (Error, OSError):
        return f"backend not built, installed {installed}"


def _faults(chosen: argparse.Namespace) -> None:
    ffi, C = lib()
    points = json.loads(ffi.string(C.ft_fault_points()).decode())
    if chosen.json:
        print(json.dumps(points, indent=2))
        return
    width = max(len(point["name"]) for point in points)
    for point in points:
        print(f"{point['name']:{width}}  {point['where']}")
    print('\nSet one with FTCOMM_FAULTS="rank=2,at=NAME:NTH,do=kill"')
    print("do: kill, stop:SECONDS, exit:CODE, delay:MS, corrupt, cut:RANK")


def _sim(arguments: Sequence[str]) -> int:
    program = native_path("ftcomm-sim")
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what it starts would, too
    os.execv(program, [program, *arguments])


def _timeline(arguments: Sequence[str]) -> int:
    from ftcomm.launch.timeline import main as draw

    return int(draw(arguments))


def _tune(arguments: Sequence[str]) -> int:
    from ftcomm.tune import main as tune

    return int(tune(arguments))


def _store(arguments: Sequence[str]) -> int:
    try:
        from ftcomm.launch.keeper import main as keep
    except ImportError:
        raise ConfigError("ftcomm store serves torch's rendezvous, and torch is not installed here.") from None
    return int(keep(arguments))


def _clean(chosen: argparse.Namespace) -> None:
    """Shared memory has no names, so that only folders can be left behind by SIGKILL: ftrun's, and the logs of replay."""
    from ftcomm.launch.folder import remove_abandoned
    from ftcomm.launch.pair_log import default_place, remove_abandoned_logs, remove_logs_of_others

    removed: list[str] = []
    remove_abandoned(removed.append)
    given = [os.environ[name] for name in ("FTCOMM_LOG_DIR", "FTCOMM_LOG_SPILL") if os.environ.get(name)]
    for place in dict.fromkeys(map(os.path.realpath, [default_place(), *given, *chosen.folder])):
        remove_abandoned_logs(Path(place), removed.append)
    remove_logs_of_others(removed.append)
    print("\n".join(f"removed {path}" for path in removed) or "Nothing was left behind.")


def _version(_: argparse.Namespace) -> None:
    print(__version__)


_COMMANDS = {
    "info": (_info, "versions, transports, CPU features, the torch it was built for"),
    "faults": (_faults, "every failpoint by name, with what it does"),
    "clean": (_clean, "removes what killed jobs left behind"),
    "version": (_version, "prints the version"),
}

if __name__ == "__main__":
    sys.exit(main())
