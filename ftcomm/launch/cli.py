"""``ftrun``: torchrun's command line and environment, with workers that are replaced one by one."""

from __future__ import annotations

import argparse
import errno
import functools
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher

from ftcomm._lib import check, lib
from ftcomm.errors import ConfigError
from ftcomm.launch.agent import FtAgent
from ftcomm.launch.background import BackgroundWriter
from ftcomm.launch.folder import RunFolder
from ftcomm.launch.meeting import name_methods_quickly
from ftcomm.launch.narrator import Narrator
from ftcomm.launch.nodes import FAILURES, WHY
from ftcomm.launch.own_address import own_address
from ftcomm.launch.pair_log import PairLog
from ftcomm.launch.parent import raise_file_limit
from ftcomm.launch.replay import ReplayAgent
from ftcomm.launch.signals import Signals, parse_signals
from ftcomm.launch.standbys import check_standbys
from ftcomm.launch.summary import Ledger
from ftcomm.launch.supervisor import Setting, replaced
from ftcomm.launch.worker import describe_exit
from ftcomm.options import Options

DEFAULT_MAX_RESTARTS = 3
# Flag -> environment variable of the workers. Each is an Options field; a flag wins over a variable that is set already.
OPTION_FLAGS = {
    "policy": "what a death does to a pending operation: raise (default), lossy, replay (its replacement goes on out of a log)",
    "log": "under --policy replay, which messages are logged: all (default), inter-host, or between groups, as 0,1/2,3",
    "heartbeat": "seconds of silence before a rank is suspected (default 1)",
    "timeout": "seconds for an operation that a live rank never enters",
    "transport": "auto (default), shm, tcp",
    "interface": "network interface or address to bind",
    "host": "host identity: ranks with the same one share memory",
    "authority": "who decides membership: auto (default), shm, store",
    "faults": 'failpoints, for example "rank=2,at=step:120,do=kill" (`ftcomm faults` lists them)',
}


def parser() -> argparse.ArgumentParser:
    """torchrun's parser with ftcomm's flags."""
    result: argparse.ArgumentParser = torchrun.get_args_parser()
    result.prog = "ftrun"
    result.description = (
        "Starts workers as torchrun does. A worker that fails is replaced alone, while the others go on. "
        "Exit code: 0 all workers succeeded; 1 a worker failed for good; 130 or 143 interrupted."
    )
    for action in result._actions:
        if action.dest == "max_restarts":
            action.default = os.environ.get("PET_MAX_RESTARTS") or DEFAULT_MAX_RESTARTS
            action.help = (
                f"How often a slot's worker is replaced before the slot is given up (default {DEFAULT_MAX_RESTARTS})."
            )
        elif action.dest == "monitor_interval":
            action.help = "Accepted for torchrun's sake; ftrun waits for events and has no interval."
    group = result.add_argument_group("ftcomm")
    for name, meaning in OPTION_FLAGS.items():
        group.add_argument(f"--{name}", metavar=name.upper(), help=f"{meaning}; sets FTCOMM_{name.upper()}")
    group.add_argument(
        "--pair-log",
        metavar="DIR",
        help="under --policy replay: where the pair log's folder is made (default: FTCOMM_LOG_DIR, else /dev/shm)",
    )
    group.add_argument(
        "--standby",
        metavar="N",
        help="how many processes of each node have done the script's imports and wait to become a replacement "
        "(default: FTCOMM_STANDBY, else 0)",
    )
    group.add_argument("--events", metavar="DIR", help="run folder for events.jsonl (default: none is kept)")
    return result


def main(argv: list[str] | None = None) -> int:
    """Runs a job and returns ftrun's exit code."""
    _fill_standard_descriptors()
    args = parser().parse_args(argv)
    for name in OPTION_FLAGS:
        value = getattr(args, name)
        if value is not None:
            os.environ[f"FTCOMM_{name.upper()}"] = value
    raise_file_limit()
    try:
        options = Options()  # a wrong value is told once, here, instead of by every worker
        check(
            lib()[1].ft_fault_configure(os.environ.get("FTCOMM_FAULTS", "").encode(), -1, 0)
        )  # no rank: only reads it
        handled = parse_signals(args.signals_to_handle)
        standbys = check_standbys(args)
        _check(args)
        args.local_addr = own_address(args)
        if args.pair_log and options.policy != "replay":
            raise ConfigError("--pair-log is for --policy replay")
    except (ConfigError, ValueError, AssertionError, RuntimeError, OSError) as error:
        print(f"ftrun: {error}", file=sys.stderr)
        return 2
    # torch's agent says there that it shuts the workers down on a signal, which is not what happens here.
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    args.run_path = False  # a script is always started in a fresh interpreter
    out = BackgroundWriter(2)
    narrator = Narrator(out)
    signals = Signals(handled)
    signals.collect()  # until all is made that has to be removed, whatever comes
    pair_log: PairLog | None = None
    folder: RunFolder | None = None

    def end(handlers: Signals | None) -> None:
        if pair_log is not None:
            pair_log.remove()
        if handlers is not None:
            handlers.close()
        if folder is not None:
            _end(folder, narrator)
        out.close()

    def cut_short(sig: signal.Signals) -> NoReturn:
        try:
            narrator.say(f"interrupted by {sig.name}")
            end(None)
        finally:
            os._exit(128 + sig)

    try:
        try:
            if options.policy == "replay":
                pair_log = PairLog(args.pair_log or options.log_dir, options.log_spill)
            # Of an ftrun whose worker has started this one, the folder is its own.
            inherited = None if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get("FTCOMM_EVENTS")
            folder = RunFolder(args.events or inherited or None)
        except (ConfigError, OSError) as error:
            print(f"ftrun: {error}", file=sys.stderr)
            return 2
        if not args.log_dir:
            args.log_dir = str(folder.path / "logs")  # torch's default is a folder in /tmp that nobody ever removes
        nodes = torchrun.parse_min_max_nnodes(args.nnodes)[1]
        flags = 2 if args.module else 1
        return _run(args, Setting(folder, narrator, signals, pair_log, standbys, nodes, flags), cut_short)
    finally:
        signals.collect()  # one that comes now interrupts nothing
        end(signals)


def _fill_standard_descriptors() -> None:
    """Whoever has started ftrun may have closed some. A pipe or a log file that got one's number would be written to as if it
    were that, by workers too.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    # What the interpreter has found closed at its start is None, and stays so.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _end(folder: RunFolder, narrator: Narrator) -> None:
    ledger, last = Ledger(), ""
    try:
        merged = folder.merge(ledger.hear)
        last = f"events: {_shown(str(merged))}" if merged is not None else ""
    except OSError as error:  # a full disk
        merged = None
        last = f"the events of all workers are not in one file: {error}"
    # As they came, those of different workers were not in order: good for a sum where there is nothing better.
    for line in (ledger if merged is not None else narrator.ledger).close():
        narrator.say(line)
    if last:
        narrator.say(last)
    folder.close()


def _check(args: argparse.Namespace) -> None:
    """What torchrun finds out in the middle of its start. Its error says what is wrong: it has no class of its own for them."""
    config, _, _ = torchrun.config_from_args(argparse.Namespace(**vars(args) | {"log_dir": os.devnull}))
    if "/" in config.run_id:
        raise ValueError(f"--rdzv-id {config.run_id!r} can't have a slash: folders are named after it")
    if args.no_python and shutil.which(args.training_script) is None:
        raise ValueError(f"there is no program {args.training_script!r} (--no-python)")
    if args.log_dir and args.log_dir != os.devnull:
        os.makedirs(args.log_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=args.log_dir):
            pass


def _run(args: argparse.Namespace, setting: Setting, cut_short: Callable[[signal.Signals], NoReturn]) -> int:
    say = setting.narrator.say
    agent = FtAgent if setting.pair_log is None else ReplayAgent
    try:
        try:
            name_methods_quickly()
            setting.signals.interrupt(cut_short)
            with replaced(launcher, "LocalElasticAgent", functools.partial(agent, setting=setting)):
                torchrun.run(args)
        finally:
            setting.signals.collect()  # before anything is said: it may be cut short just now
    except SignalException as error:
        say(f"interrupted by {error.sigval.name}")
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if rank in setting.ended_along:
                say(f"rank {rank} was ended: {setting.ended_along[rank]}")
                continue
            told = failure.error_file_data.get("message")  # a dict where the script's main has torch's @record
            detail = f": {told.get('message')}" if isinstance(told, dict) else ""
            say(f"rank {rank} failed for good: {describe_exit(failure.exitcode)}{detail}")
        return 1
    except ConfigError as error:
        say(str(error))
        return 2
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        say(f"{error}. ftrun needs some open files for each worker: raise the limit (ulimit -n)")
        return 1
    except RendezvousError as error:
        option = f"--master-addr {args.master_addr} --master-port {args.master_port}"
        where = f"--rdzv-endpoint {args.rdzv_endpoint}" if args.rdzv_endpoint else option
        say(f"the nodes did not come together: {str(error) or type(error).__name__} ({where})")
        return 1
    if setting.place_is_lost:
        say("another ftrun has taken this node's place meanwhile")
        return 1
    failed = {node: end for node, end in sorted(setting.other_nodes.items()) if end in FAILURES}
    for node, end in failed.items():
        say(f"this node's workers succeeded, but {WHY[end].format(node)}")
    if not failed:
        say("all workers succeeded")
    return 1 if failed else 0


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


if __name__ == "__main__":
    sys.exit(main())
