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
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from ftcomm.launch.background import BackgroundWriter
from ftcomm.launch.parent import raise_file_limit
from ftcomm.launch.places import Places, Silence

PORT = 29400  # torchrun's own for a c10d rendezvous
_NEXT = "ftcomm/store/next"  # the number of the first letter that is not read yet; there as soon as a keeper is
LOOK = 60.0  # seconds between two looks at the runs that are there, if nobody writes
GONE = 900.0  # without a beat of any of its nodes


def is_kept(store: Store) -> bool:
    """Whether it is a keeper's, in which nodes meet."""
    return bool(store.check([_NEXT]))


def ask_for_store(store: Store, run: str, prefix: str, nodes: int) -> int | str:
    """The port of a new store for a run that begins, or why there is none. Closes that of an earlier run of the name.

    Args:
        store: where the nodes of the run have met; it is kept.
        prefix: of the run's own keys there.
        nodes: how many the run has.

    Raises:
        DistError: the keeper is gone.
    """
    answer: int | str = json.loads(store.get(_answer(_post(store, opens=run, prefix=prefix, nodes=nodes))))
    return answer


def close_store(store: Store, run: str, port: int) -> None:
    """Of a run that is over."""
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


class _Run:
    """Its store is closed when nobody refers to it."""

    def __init__(self, store: TCPStore, places: Places, nodes: int) -> None:
        self.store = store
        self._places, self._nodes = places, nodes
        self._silence = Silence(most=2 * LOOK)

    def is_gone(self) -> bool:
        """None of its nodes has shown itself for long. Asked every now and then."""
        began = time.monotonic()
        self._silence.look(began, [self._places.beats(node) for node in range(self._nodes)])
        return self._silence.seconds > GONE


class Keeper:
    """Has the stores."""

    def __init__(self, port: int) -> None:
        self._rendezvous = _serve(port)
        self._rendezvous.set_timeout(timedelta(seconds=LOOK))
        self._runs: dict[str, _Run] = {}
        self._number = 1
        self._rendezvous.set(_NEXT, "1")

    @property
    def port(self) -> int:
        return int(self._rendezvous.port)

    def read_next(self) -> list[str]:
        """Waits for a letter and does what it says, or for a while. Returns what was done."""
        try:
            letter = self._rendezvous.get(_letter(self._number))
        except DistStoreError:  # there was none
            return self._close_silent()
        try:
            done = self._do(json.loads(letter))
        except (ValueError, KeyError, TypeError):
            done = f"somebody has written {letter[:100]!r}, which is no letter of ftrun's"
        self._number += 1
        self._rendezvous.set(_NEXT, str(self._number))
        return [done, *self._close_silent()]

    def _do(self, letter: dict[str, str | int]) -> str:
        if "opens" in letter:
            run, prefix, nodes = str(letter["opens"]), str(letter["prefix"]), int(letter["nodes"])
            try:
                store = _serve(0)
            except (RuntimeError, OSError) as error:  # too many files
                self._answer(str(error).partition("\n")[0])
                return f"run {run!r} can't begin: {error}"
            self._runs[run] = _Run(store, Places(PrefixStore(prefix, self._rendezvous)), nodes)
            self._answer(store.port)
            return f"run {run!r} begins: its store is at port {store.port}"
        run = str(letter["closes"])
        if run in self._runs and self._runs[run].store.port == letter["port"]:
            del self._runs[run]
        return f"run {run!r} is over"

    def _answer(self, answer: str | int) -> None:
        self._rendezvous.set(_answer(self._number), json.dumps(answer))

    def _close_silent(self) -> list[str]:
        gone = [name for name, run in self._runs.items() if run.is_gone()]
        for name in gone:
            del self._runs[name]
        return [f"run {name!r} has shown nothing for long: its store is closed" for name in gone]


def _serve(port: int) -> TCPStore:
    return TCPStore("localhost", port, is_master=True, wait_for_workers=False)


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
    out = BackgroundWriter(2)  # whoever reads it, or does not, must not keep a run waiting

    def say(text: str) -> None:
        out.write(f"ftcomm store: {text}\n")

    say(
        f"listening: ftrun --rdzv-backend c10d --rdzv-endpoint HOST:{keeper.port} --rdzv-conf is_host=0 --rdzv-id NAME ..."
    )
    while True:
        for done in keeper.read_next():
            say(done)


def _reason(error: DistNetworkError) -> str:
    return "it is in use" if "EADDRINUSE" in str(error) else str(error).partition("\n")[0]
