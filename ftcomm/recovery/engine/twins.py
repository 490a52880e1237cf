"""Stages that have replicas, under the policy replay: who dies takes a replica's state, and need not go back to its checkpoint.

SWIFT combines replication where there are replicas with logging where there are none (figure 2). Here each rank notes its place
in the logs at the end of each step (``Communicator.note``). A replacement that finds a living replica whose state is that of such
a place takes that state, and does again what came after it only. Replicas that have gone one update further than the newest note
have lost that state, and then the checkpoint is there as ever.

The state is served by a thread while the script waits, as it soon does for a replica that is dead. From the optimizer's step on
to the next begin of a step nothing is served, and while the state is copied the optimizer's step waits. (Nobody waits in a
circle: the thread needs nothing of the script, and a replacement gives up after a while.)
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

from ftcomm.communicator import Communicator
from ftcomm.errors import Closed, ConfigError, LogCorrupt, LogFull
from ftcomm.recovery.engine.beginning import Beginning
from ftcomm.recovery.engine.lines import Line, Server, call, find
from ftcomm.recovery.engine.logged_groups import LoggedGroups
from ftcomm.recovery.engine.message import Packed, framed, pack, receive, receive_framed, send, unpack
from ftcomm.recovery.engine.saved import RunState
from ftcomm.torch.blocks import checksum

__all__ = ["Twins"]

NAME = "twins"
UPDATING = 1.0  # seconds: so long an update may take, and a rank that has died in the same step is not waited for
SILENT = 5.0  # seconds: then another replica is asked, or the checkpoint is taken
COPYING = 30.0  # seconds, with the state: it is copied first


class Twins:
    """One rank's part: it notes its places, serves its replicas' replacements, and is served if it is one itself.

    Args:
        group: of the replicas.
    """

    def __init__(self, group: Communicator, state: RunState, module: Any, optimizer: Any) -> None:
        self._group, self._beginning = group, Beginning(state, module, optimizer)
        self._changed = threading.Condition()  # of the beginning
        self._server: Server | None = None
        self._out = False

    def close(self) -> None:
        """The loop is over."""
        self.updates()
        if self._server is not None:
            self._server.close()

    # -- who lives

    def begins(self, groups: LoggedGroups, saved: bool) -> None:
        """A step begins, and no gradients are left from the last one. ``saved``: all ranks have a checkpoint of it."""
        if self._out:
            return
        try:
            with self._changed:
                tag = self._beginning.take(saved)
                self._changed.notify_all()
            if self._server is None:
                self._server = Server(self._group.job, NAME, self._serve)
        except Exception as error:  # noqa: BLE001 - of whatever the script has in there, or of sockets: training needs none of it
            self._out = True
            self.updates()
            self._say(f"replacements do not get this replica's state, but go on from their checkpoints: {error}")
            return
        with contextlib.suppress(ConfigError, Closed, LogCorrupt, LogFull):  # something of the script may be open, say
            groups.note(tag)

    def updates(self) -> None:
        """The optimizer is about to."""
        with self._changed:  # not while a copy is made
            self._beginning.drop()

    def _serve(self, line: Line) -> None:
        line.wait_at_most(COPYING)
        wanted = receive(line.socket)
        with self._changed:
            self._changed.wait_for(lambda: self._beginning.tag, UPDATING)
            tag, refusal = self._beginning.tag, self._refusal(wanted)
            send(line.socket, refusal)
            if refusal:
                return
            try:
                frame = framed(self._beginning.content())
                if not self._beginning.is_there():  # a forward pass may have begun meanwhile
                    tag, frame = "", framed("its state changed while it was copied")
            except Exception as error:  # noqa: BLE001 - of a state_dict, of pickle
                tag, frame = "", framed(f"its state can't be sent ({type(error).__name__}: {error})")
        send(line.socket, frame)
        send(line.socket, (tag, checksum(frame.buffer) if tag else 0))

    def _refusal(self, wanted: list[str]) -> str:
        if not self._beginning.tag:
            return "it is in an update, or begins itself"
        if self._beginning.tag not in wanted:
            return f"it is at another step, or in another state ({self._beginning.tag})"
        if not self._beginning.is_there():
            return "its state has changed since the step began"
        return ""

    # -- who comes back

    def fetch(self, wanted: list[str]) -> tuple[str, dict[str, Any]] | None:
        """A note, and what a checkpoint of that place would hold; None: no replica has it."""
        job, refusals = self._group.job, []
        for slot in self._group.slots:
            if slot == job.rank:
                continue
            begin = time.monotonic()
            try:
                tag, saved = self._ask(slot, wanted)
            except Exception as error:  # noqa: BLE001 - dead, stopped, somebody else, no memory: there is the checkpoint
                refusals.append(f"rank {slot}: {error}" if isinstance(error, _Refused) else f"rank {slot}: {error!r}")
                continue
            nbytes = sum(tensor.nbytes for tensor in pack(saved).tensors)
            job.emit(
                "rejoined",
                slot=job.rank,
                incarnation=job.incarnation,
                step=int(tag.split()[0]),
                bytes=nbytes,
                moved=nbytes,
                rounds=1,
                damaged=0,
                seconds=time.monotonic() - begin,
                sources=[slot],
            )
            self._say(f"goes on at step {tag.split()[0]}, with the state of rank {slot}")
            return tag, saved
        self._say(f"no replica has its state: {'; '.join(refusals)}")
        return None

    def _ask(self, slot: int, wanted: list[str]) -> tuple[str, dict[str, Any]]:
        address = find(self._group.job, NAME, slot)
        if address is None:
            raise _Refused("it has not begun")
        line = call(address)
        try:
            line.wait_at_most(SILENT)
            line.prove(bytes.fromhex(address["secret"]), first=False)
            send(line.socket, wanted)
            if refusal := receive(line.socket):
                raise _Refused(refusal)
            line.wait_at_most(COPYING)
            saved, buffer = receive_framed(line.socket)
            tag, sum_ = receive(line.socket)
        finally:
            line.close()
        if not tag:
            raise _Refused(saved)
        if checksum(buffer) != sum_:
            raise _Refused("its state came damaged")
        # Each tensor by itself, as what keeps one should not keep the rest; but one that is there twice stays one.
        packed = pack((saved["optimizer"], saved["state"]))
        own = unpack(Packed(packed.structure, [tensor.detach().clone() for tensor in packed.tensors]))
        return tag, {**saved, "optimizer": own[0], "state": own[1]}

    def _say(self, text: str) -> None:
        print(f"ftcomm: rank {self._group.job.rank}: {text}", file=sys.stderr, flush=True)


class _Refused(Exception):
    """By a replica, in words."""
