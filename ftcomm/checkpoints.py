"""Checkpoints of a job under the policy ``replay``: they bound the log, and how much a replacement has to do again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ftcomm._lib import check, lib
from ftcomm.arguments import integer
from ftcomm.errors import ConfigError, Mismatch
from ftcomm.request import Request

if TYPE_CHECKING:
    from ftcomm.job import Job

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
    _ordered: tuple[Any, int]

    def commit_checkpoint(self, tag: str | int) -> None:
        """Says that this rank's state at this point is saved as ``tag``. Collective, all or none, also when a rank dies in it.

        Each rank saves its state first. From then on a replacement may go on from here, and what came before the checkpoint
        before the last is given up by the log (the newest may turn out to be damaged: the one before it still works).
        The hybrid of checkpoint and log that Grover and Rajagopal (2022) leave to future work.

        Raises:
            ConfigError: on all ranks alike: a message was sent and not received, an operation is open, ranks gave different
                tags, or :meth:`resume` was not called before.
            LogFull: on all ranks alike: the logs of ``ranks`` have no room for it.
            ReplayDiverged: a process before this one committed another tag here.
        """
        request = Request(self._job, self.size, None, f"commit_checkpoint({tag!r}) on {self.name}")
        request.post(lib()[1].ft_comm_commit, *self._ordered, _text_of(tag).encode()).wait()
        self._job.emit("checkpoint", tag=tag, comm=self.name)

    def log_position(self, iteration: int, micro_batch: int | None = None) -> None:
        """Says where the program is: the log's records of the messages that are sent from now on carry it, and so does
        :class:`ReplayDiverged`.

        Without ``micro_batch`` the nth message to each rank from now on is said to be of micro-batch n (from 0): right for a
        pipeline that sends one tensor for each micro-batch, when it is called once in each iteration. Under other policies than
        ``replay`` it does nothing.
        """
        iteration = integer("iteration", iteration)
        micro = -1 if micro_batch is None else integer("micro_batch", micro_batch)
        if iteration < 0 or not (micro_batch is None or 0 <= micro < 1 << 32):
            raise ConfigError(f"log_position({iteration!r}, {micro_batch!r}): give two numbers that are not negative.")
        check(lib()[1].ft_comm_log_position(*self._ordered, iteration, micro))

    def log_flush(self) -> None:
        """Writes to the log what is logged asynchronously (``log_mode="async"``): if this rank dies now, its replacement sends
        none of it again.

        Nothing needs it to be exact: what is lost with a process is computed again. :meth:`commit_checkpoint`, leaving, and the
        death of another rank do the same.

        Raises:
            LogFull: the log has reached its limit. What is not written is still sent, and kept.
        """
        check(lib()[1].ft_job_flush_log(self._native[0]))

    def checkpoints(self) -> list[str | int]:
        """Tags that this rank can :meth:`resume` from, the newest first. Empty in the first process, and before a commit."""
        return self._tags(lib()[1].ft_comm_checkpoints)

    def note(self, tag: str | int) -> None:
        """Says where this rank is, by itself: not collective, and nothing waits for it.

        Its replacement may go on from here, with ``resume(tag, noted=True)``, if it has this rank's state of this point from
        somewhere else: from a replica, for instance. Messages that it has sent need not be received. Nothing is given up by the
        log for it; the newest four are kept, up to the next checkpoint. What is done again is not noted again.

        Raises:
            ConfigError: an operation of this rank is open, :meth:`resume` was not called before, or messages inside a log group
                are not logged.
            LogFull: the log has reached its limit.
        """
        check(lib()[1].ft_comm_note(*self._ordered, _text_of(tag).encode()))

    def notes(self) -> list[str | int]:
        """Tags of the :meth:`note` s that this rank can go on from, the newest first: since its newest checkpoint, and with all
        in the log that it had sent."""
        return self._tags(lib()[1].ft_comm_notes)

    def _tags(self, ask: Any) -> list[str | int]:
        ffi, _ = lib()
        size, needed = 4096, ffi.new("size_t*")
        while True:
            out = ffi.new("char[]", size)
            check(ask(*self._native, out, size, needed))
            if needed[0] < size:
                return [json.loads(text) for text in json.loads(ffi.string(out).decode())]
            size = needed[0] + 1

    def resume(self, tag: str | int | None = None, *, noted: bool = False) -> None:
        """Ends what every process does again, and goes on at the checkpoint ``tag``; None: right here (there is no checkpoint).
        ``noted``: at the :meth:`note` of that tag.

        Collective. Call it once, on every rank and in every process, after loading that checkpoint. Before it, each process
        does the same: a replacement is fed from the log there as well.

        Raises:
            ConfigError: there is no such checkpoint (the message lists those there are), or something is open.
            LogFull: on all ranks alike: the logs of ``ranks`` have no room for the mark.
            Mismatch: with ``log="inter-host"`` or groups: another rank of this one's group has only an older checkpoint. Load the
                newest of :meth:`checkpoints` and call it again.
            ReplayDiverged: a process before this one has done something else before it called resume.
        """
        ffi, C = lib()
        text = ffi.NULL if tag is None else _text_of(tag).encode()
        request = Request(self._job, self.size, None, f"resume on {self.name}")
        request.post(C.ft_comm_resume_noted if noted else C.ft_comm_resume, *self._ordered, text).wait()

    def resume_from(self, load: Callable[[str | int], T]) -> tuple[str | int | None, T | None]:
        """Loads the newest checkpoint that can be loaded, and resumes from it; ``(None, None)`` if there is none yet.

        ``load(tag)`` returns the state that was saved under ``tag``, or raises: then the one before is tried, and a line on
        stderr and an event say so. Before the first checkpoint comes the start: ``(None, None)`` as well, while the log reaches
        back to it (until the third commit).

        Raises:
            ConfigError: there are checkpoints, and none of them can be loaded.
        """
        tags = self.checkpoints()
        causes: list[str] = []
        while tags:
            tag = tags[0]
            try:
                state = load(tag)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the one before may be good
                causes.append(f"{tag!r}: {type(error).__name__}: {error}")
                self._job.emit("checkpoint-damaged", tag=tag, error=str(error))
                self._say(f"checkpoint {causes[-1]}; trying the one before")
                tags = tags[1:]
                continue
            try:
                self.resume(tag)
            except Mismatch as error:  # another rank of its log group has only an older one
                known = self.checkpoints()
                if tag in known:
                    raise
                causes.append(f"{tag!r}: {error}")
                self._job.emit("checkpoint-too-new", tag=tag, ranks=list(error.ranks))
                self._say(f"checkpoint {tag!r} is not there for rank {list(error.ranks)}; trying the one before")
                tags = [other for other in tags if other in known]
                continue
            return tag, state
        try:
            self.resume(None)
        except ConfigError as error:
            if not causes:
                raise
            raise ConfigError(f"No checkpoint of rank {self.rank} can be loaded: {'; '.join(causes)}.") from error
        return None, None

    def _say(self, text: str) -> None:
        print(f"ftcomm: rank {self.rank}: {text}", file=sys.stderr, flush=True)


def _text_of(tag: str | int) -> str:
    if not isinstance(tag, (str, int)) or isinstance(tag, bool):
        raise ConfigError(f"The tag of a checkpoint is {tag!r}; give a string or an integer.")
    return json.dumps(tag)
