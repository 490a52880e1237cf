"""Checkpoints of a job under the policy ``replay``: they bound the log, and how much a replacement has to do again."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ftcomm._lib import check, lib
from ftcomm.errors import ConfigError

if TYPE_CHECKING:
    from ftcomm.job import Job
    from ftcomm.request import Outcome

__all__ = ["Checkpoints"]

T = TypeVar("T")


class Checkpoints:
    """Mixed into Communicator. The state itself is the program's to save, before it commits; here is when that counts.

    A program that uses checkpoints calls, in this order: what every process does again (building the model, first collectives);
    :meth:`resume_from` (or :meth:`resume`) once; then its loop, with :meth:`commit_checkpoint` after each save.
    """

    _job: Job
    name: str
    rank: int
    size: int
    _native: tuple[Any, int]
    all_gather: Callable[..., Outcome]

    def commit_checkpoint(self, tag: str | int) -> None:
        """Says that this rank's state at this point is saved as ``tag``. Collective, all or none, also when a rank dies in it.

        Each rank saves its state first. From then on a replacement may go on from here, and what came before the checkpoint
        before the last is given up by the log (the newest may turn out to be damaged: the one before it still works).
        The hybrid of checkpoint and log that Grover and Rajagopal (2022) leave to future work.

        Raises:
            ConfigError: on all ranks alike: a message was sent and not received, an operation is open, ranks gave different
                tags, or :meth:`resume` was not called before.
            ReplayDiverged: a process before this one committed another tag here.
        """
        text = _text_of(tag)
        self._agree(f"Checkpoint {tag!r}", text)
        check(lib()[1].ft_comm_mark(*self._native, text.encode()))
        self._job.emit("checkpoint", tag=tag, comm=self.name)

    def _agree(self, what: str, tag: str | None) -> None:
        """Whether all ranks are at the same point, with no message under way: the same answer on all."""
        ffi, C = lib()
        sent, received = ffi.new("uint64_t[]", self.size), ffi.new("uint64_t[]", self.size)
        state = ffi.new("int32_t*")
        check(C.ft_comm_position(*self._native, sent, received, state))
        if tag is not None and not state[0] & 2:
            raise ConfigError(
                f"{what}: call resume() first, once, where the preparations end that every process makes again: it says what a "
                "replacement can leave out."
            )
        digest = int.from_bytes(hashlib.blake2b((tag or "").encode(), digest_size=7).digest(), "little")
        mine = array("q", [digest, state[0] & 1, *sent, *received])
        width = len(mine)
        everybody = array("q", bytes(8 * width * self.size))
        self.all_gather(everybody, mine)
        rows = [everybody[r * width : (r + 1) * width] for r in range(self.size)]
        other = [r for r, row in enumerate(rows) if row[0] != rows[0][0]]
        if other:
            raise ConfigError(f"{what}: ranks {other} gave another tag. Give the same one on every rank.", ranks=other)
        n = self.size
        for src in range(n):
            for dst in range(n):
                ahead = rows[src][2 + dst] - rows[dst][2 + n + src]
                if ahead:
                    raise ConfigError(
                        f"{what}: {ahead} message(s) from rank {src} to rank {dst} have not been received. Receive everything "
                        "first.",
                        ranks=[src, dst],
                    )
        busy = [r for r, row in enumerate(rows) if not row[1]]
        if busy:
            raise ConfigError(
                f"{what}: ranks {busy} have operations that are not done. Wait for all requests first.", ranks=busy
            )

    def checkpoints(self) -> list[str | int]:
        """Tags that this rank can :meth:`resume` from, the newest first. Empty in the first process, and before a commit."""
        ffi, C = lib()
        size, needed = 4096, ffi.new("size_t*")
        while True:
            out = ffi.new("char[]", size)
            check(C.ft_comm_checkpoints(*self._native, out, size, needed))
            if needed[0] < size:
                return [json.loads(text) for text in json.loads(ffi.string(out).decode())]
            size = needed[0] + 1

    def resume(self, tag: str | int | None = None) -> None:
        """Ends what every process does again, and goes on at the checkpoint ``tag``; None: right here (there is no checkpoint).

        Collective. Call it once, on every rank and in every process, after loading that checkpoint. Before it, each process
        does the same: a replacement is fed from the log there as well.

        Raises:
            ConfigError: there is no such checkpoint (the message lists those there are), or something is open.
            ReplayDiverged: a process before this one has done something else before it called resume.
        """
        ffi, C = lib()
        if self._job.options.policy == "replay":
            self._agree("resume", None)
        check(C.ft_comm_resume(*self._native, ffi.NULL if tag is None else _text_of(tag).encode()))

    def resume_from(self, load: Callable[[str | int], T]) -> tuple[str | int | None, T | None]:
        """Loads the newest checkpoint that can be loaded, and resumes from it; ``(None, None)`` if there is none yet.

        ``load(tag)`` returns the state that was saved under ``tag``, or raises: then the one before is tried, and a line on
        stderr and an event say so.

        Raises:
            ConfigError: there are checkpoints, and none of them can be loaded.
        """
        tags = self.checkpoints()
        causes = []
        for tag in tags:
            try:
                state = load(tag)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the one before may be good
                causes.append(f"{tag!r}: {type(error).__name__}: {error}")
                self._job.emit("checkpoint-damaged", tag=tag, error=str(error))
                print(
                    f"ftcomm: rank {self.rank}: checkpoint {causes[-1]}; trying the one before",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            self.resume(tag)
            return tag, state
        if tags:
            raise ConfigError(f"No checkpoint of rank {self.rank} can be loaded: {'; '.join(causes)}.")
        self.resume(None)
        return None, None


def _text_of(tag: str | int) -> str:
    if not isinstance(tag, (str, int)) or isinstance(tag, bool):
        raise ConfigError(f"The tag of a checkpoint is {tag!r}; give a string or an integer.")
    return json.dumps(tag)
