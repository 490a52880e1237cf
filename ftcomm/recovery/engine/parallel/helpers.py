"""A replacement's side: connections to the ranks that help it, and what each of them computes.

Nobody is waited for who has something to hide: a helper that refuses, dies or takes much longer than this process itself is left
out, and its micro-batches are computed here.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from typing import Any

from torch import nn

from ftcomm.errors import ReplayDiverged
from ftcomm.job import Job
from ftcomm.recovery.engine.lines import CONNECTING, Address, Line, call, find
from ftcomm.recovery.engine.message import Frame, Packed, framed, receive, send
from ftcomm.recovery.engine.parallel.service import NAME
from ftcomm.recovery.engine.parallel.work import Done, Item, compute, parts, settings

__all__ = ["Helper", "Helpers"]

SLACK, SLOWER = 1.0, 5.0  # a helper has a second more than five times what its work would take here
AT_ONCE = 2  # results of a helper that are kept here: each is as large as the stage


class Helper(threading.Thread):
    """One rank that may help. Its thread sends and receives, so that all helpers and this process work at the same time.

    Attributes:
        settled: ready, or out.
        ready: can be asked.
        micro_batches: of its results that were used.
        why: it is out.
    """

    def __init__(self, rank: int, address: Address, greeting: dict[str, Any]) -> None:
        super().__init__(name=f"ftcomm-helper-{rank}", daemon=True)
        self.rank, self.ready, self.micro_batches, self.why = rank, False, 0, ""
        self.settled = threading.Event()
        self._address, self._greeting = address, greeting
        self._line: Line | None = None
        self._left = threading.Event()
        self._asked: queue.SimpleQueue[tuple[Frame, list[Item]] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(AT_ONCE)
        self._answers: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        self._silent = False

    def run(self) -> None:
        try:
            self._connect()
            while self.ready and (asked := self._asked.get()) is not None and self._line is not None:
                module, items = asked
                send(self._line.socket, module)
                send(self._line.socket, items)
                del asked, module  # as large as the stage: not until the next step
                for _ in items:
                    self._room.acquire()
                    if self._left.is_set():
                        return
                    answer = receive(self._line.socket)
                    if isinstance(answer, str):
                        self.why = answer
                        return
                    self._answers.put(answer)
        except (
            OSError,
            EOFError,
            AuthenticationError,
            AssertionError,
        ) as error:  # the last: something else listens there
            if not self._left.is_set():  # else this end has cut the line
                self.why = self.why or f"{type(error).__name__}: {error}"
        finally:
            self.ready = False
            self.settled.set()
            self._answers.put(None)
            if self._line is not None:
                self._line.close()

    def _connect(self) -> None:
        self._line = call(self._address)
        if self._left.is_set():
            return
        self._line.prove(bytes.fromhex(self._address["secret"]), first=False)
        send(self._line.socket, self._greeting)
        self.why = receive(self._line.socket)
        self.ready = not self.why
        self.settled.set()

    def ask(self, module: Frame, items: list[Item]) -> None:
        self._asked.put((module, items))

    def answer(self, patience: float) -> Done | None:
        """The next micro-batch; None: it is out."""
        if self._silent:
            return None
        try:
            found = self._answers.get(timeout=patience)
        except queue.Empty:
            self.leave("it took too long")
            found = None
        self._silent = found is None
        self._room.release()
        return found

    def leave(self, why: str = "") -> None:
        self.ready, self.why = False, self.why or why
        self._left.set()
        self._room.release()
        self._asked.put(None)
        if self._line is not None:
            self._line.cut()


class Helpers:
    """All of them, twice as many as can have something to do: some may refuse."""

    def __init__(self, job: Job, micro_batches: int) -> None:
        self._greeting = {"rank": job.rank, "settings": settings()}
        self.all: list[Helper] = []
        # Each replacement begins with its neighbour, so that two do not ask the same ones of many.
        others = sorted((rank for rank in job.alive() if rank != job.rank), key=lambda rank: (rank < job.rank, rank))
        for rank in others:
            if len(self.all) < 2 * (micro_batches - 1) and (address := find(job, NAME, rank)) is not None:
                self.all.append(Helper(rank, address, self._greeting))
                self.all[-1].start()
        self._first = True
        atexit.register(self.close)  # as a service does

    def compute(
        self,
        module: nn.Module,
        loss_of: Callable[..., Any] | None,
        items: Sequence[Item],
        packed: Packed,
        differing: Callable[[Item, Done], str],
    ) -> Iterator[Done]:
        """Each has its turn, this process the first one. Results come in the items' order.

        Args:
            packed: module and loss function.
            differing: says of a result how it is wrong, or "".

        Raises:
            ReplayDiverged: this process's own result is.
        """
        if self._first:
            self._first, until = False, time.monotonic() + CONNECTING
            for helper in self.all:
                helper.settled.wait(max(0.0, until - time.monotonic()))
        helpers = [helper for helper in self.all if helper.ready][: len(items) - 1]
        mine, *theirs = parts(len(items), len(helpers) + 1)
        if helpers:
            module_sent = framed((packed.structure, packed.tensors))  # one copy for all of them
            for helper, part in zip(helpers, theirs, strict=True):
                helper.ask(module_sent, [items[n] for n in part])
            del module_sent
        longest = 0.0
        for n, item in enumerate(items):
            if turn := n % (len(helpers) + 1):
                helper = helpers[turn - 1]
                found = helper.answer(SLACK + SLOWER * longest * len(mine))
                if found is not None and not (why := differing(item, found)):
                    helper.micro_batches += 1
                    yield found
                    continue
                if found is not None:
                    helper.leave(f"it computes something else: {why}")
            begin = time.monotonic()
            found = compute(module, loss_of, item)
            longest = max(longest, time.monotonic() - begin)
            if why := differing(item, found):
                raise ReplayDiverged(
                    f"Micro-batch {n} of a step is not what it was before this rank died: {why}. The stage's computation depends "
                    "on something that this process has not: take no decision from time or thread order, use no state "
                    "outside of the module, and start from a fresh log."
                )
            yield found

    def close(self) -> None:
        atexit.unregister(self.close)
        for helper in self.all:
            helper.leave()
        for helper in self.all:
            helper.join()
