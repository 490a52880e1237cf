"""``ftcomm store``: stores on a host that stays, for jobs of which each node may be lost, the first one, too.

It serves torch's c10d rendezvous at one port, and opens a store of its own for each run, where its membership is decided and
torch's process groups meet: they are to find nothing there that a run before has left. Whoever founds a run writes a letter,
which makes the key with the next free number by compare-and-set; letters are read in the order of their numbers. So one that
dies with half a request leaves nothing for which anybody would wait.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore

from ftcomm.launch.parent import raise_file_limit

PORT = 29400  # torchrun's own for a c10d rendezvous
_NEXT = "ftcomm/store/next"  # the number of the first letter that is not read yet; there as soon as a keeper is
_FOR_EVER = timedelta(days=3650)


def is_kept(store: Store) -> bool:
    """Whether it is a keeper's, in which nodes meet."""
    return bool(store.check([_NEXT]))


def ask_for_store(store: Store, run: str) -> tuple[str, int]:
    """Host and port of a new store for a run that begins. Closes that of an earlier run of the name.

    Args:
        store: where the nodes of the run have met; it is kept.

    Raises:
        DistError: the store has gone.
    """
    port = store.get(_answer(_post(store, opens=run)))
    return store.host, int(port)


def close_store(store: Store, run: str, port: int) -> None:
    """Nobody uses it any more."""
    _post(store, closes=run, port=port)


def _post(store: Store, **letter: str | int) -> int:
    text = json.dumps({**letter, "from": secrets.token_hex(8)})  # unlike all others
    number = int(store.get(_NEXT))
    while store.compare_set(_letter(number), "", text).decode() != text:
        number += 1
    return number


def _letter(number: int) -> str:
    return f"ftcomm/store/letter/{number}"


def _answer(number: int) -> str:
    return f"ftcomm/store/port/{number}"


class Keeper:
    """Has the stores: each is closed when nobody refers to it."""

    def __init__(self, port: int) -> None:
        self._rendezvous = _serve(port)
        self._stores: dict[str, TCPStore] = {}  # by run
        self._number = 1
        self._rendezvous.set(_NEXT, "1")

    @property
    def port(self) -> int:
        return int(self._rendezvous.port)

    def read_next(self) -> str:
        """Waits for a letter and does what it says. Returns what that was."""
        letter = self._rendezvous.get(_letter(self._number))
        try:
            done = self._do(json.loads(letter))
        except (ValueError, KeyError, TypeError):
            done = f"somebody has written {letter[:100]!r}, which is no letter of ftrun's"
        self._number += 1
        self._rendezvous.set(_NEXT, str(self._number))
        return done

    def _do(self, letter: dict[str, str | int]) -> str:
        if "opens" in letter:
            run = str(letter["opens"])
            self._stores.pop(run, None)
            store = self._stores[run] = _serve(0)
            self._rendezvous.set(_answer(self._number), str(store.port))
            return f"run {run!r} begins: its store is at port {store.port}"
        run = str(letter["closes"])
        if run in self._stores and self._stores[run].port == letter["port"]:
            del self._stores[run]
        return f"run {run!r} is over"


def _serve(port: int) -> TCPStore:
    return TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=_FOR_EVER)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ftcomm store",
        description="Keeps the stores of jobs on several nodes, for as long as it runs, so that none of the nodes has to stay. "
        "Start it on a host that does, and ftrun on the nodes with --rdzv-backend c10d --rdzv-endpoint THAT_HOST:PORT.",
        epilog="As torch's own, it lets in whoever reaches its ports: set the same FTCOMM_SECRET on all nodes where others may.",
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"of the rendezvous (default: {PORT}; 0: any free one)")
    port = parser.parse_args(argv).port
    if not 0 <= port < 65536:
        parser.error(f"--port {port} must be between 0 and 65535")
    raise_file_limit()
    try:
        keeper = Keeper(port)
    except DistNetworkError as error:
        print(f"ftcomm: can't listen at port {port}: {_reason(error)}. Give another one (--port)", file=sys.stderr)
        return 1
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_DFL)  # it waits in the store, where no handler of Python's runs
    _say(
        f"listening: ftrun --rdzv-backend c10d --rdzv-endpoint HOST:{keeper.port} --rdzv-conf is_host=0 --rdzv-id NAME ..."
    )
    while True:
        _say(keeper.read_next())


def _reason(error: DistNetworkError) -> str:
    return "it is in use" if "EADDRINUSE" in str(error) else str(error).partition("\n")[0]


def _say(text: str) -> None:
    print(f"ftcomm store: {text}", file=sys.stderr, flush=True)
