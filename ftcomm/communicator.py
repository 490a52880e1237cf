"""The communicator: a group of ranks of a job, with its operations and its view of who is alive."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ftcomm._calls import calls
from ftcomm._lib import check, lib
from ftcomm.arguments import integer, seconds
from ftcomm.checkpoints import Checkpoints
from ftcomm.collectives import Collectives
from ftcomm.errors import Closed, ConfigError, Unsupported
from ftcomm.job import Job
from ftcomm.options import POLICIES
from ftcomm.point_to_point import PointToPoint
from ftcomm.request import Outcome, Request, wait_all

__all__ = ["Communicator", "communicator_id"]


def communicator_id(job: str, *parts: object) -> int:
    """The same 64-bit id on every rank that gives the same parts; never 0."""
    digest = hashlib.blake2b("\0".join((job, *map(str, parts))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class Communicator(Collectives, PointToPoint, Checkpoints):
    """A group of ranks. May be used from one thread at a time; different communicators from different threads.

    Buffers are C-contiguous NumPy arrays, torch CPU tensors or objects with the buffer protocol, of any shape: only the number of
    elements counts. ``i<name>`` starts an operation and returns a :class:`Request`, ``<name>`` waits for it and returns its
    :class:`Outcome`. Operations of a communicator run one after another, in the order of the calls, which must be the same on
    all ranks.

    Raises (any collective; the output buffer's content is unspecified afterwards):
        PeerFailure: members died; under ``raise`` on every survivor, under ``lossy`` where data or a root is lost.
        Revoked: the communicator was revoked.
        Timeout: ranks that are alive did not enter within ``timeout`` seconds; ``missing`` names them.
        Mismatch: ranks called different operations, or with different sizes, types or roots.
        StaleEpoch, NoAuthority: this rank, or the whole job, can't go on.
        ConfigError: wrong arguments, found before anything is sent.

    Attributes:
        rank, size: this process's rank in the group and the group's size (under ``lossy`` it stays when a rank dies).
        name: for messages.
        id: the same on all members.
        slots: the job rank of each communicator rank.
    """

    def __init__(self, job: Job, id: int, name: str, slots: Sequence[int], policy: str) -> None:
        """Wraps a communicator that exists natively; use :meth:`create` for a new one."""
        self._job, self.id, self.name = job, id, name
        self.slots, self.policy = tuple(slots), policy
        self.size = len(self.slots)
        self.rank = self.slots.index(job.rank)
        self._closed = False
        self._calls = calls(job, id, name, self.rank, self.size)

    def _no_short_way(self) -> None:
        """From now on every call takes the long way, by a request."""
        self._calls = calls(self._job, self.id, self.name, self.rank, self.size, closed=True)

    @classmethod
    def create(
        cls,
        job: Job,
        name: str = "world",
        slots: Sequence[int] | None = None,
        *,
        id: int | None = None,
        policy: str | None = None,
        timeout: float | None = None,
    ) -> Communicator:
        """Makes a communicator of the job's ranks ``slots`` (default: all). Every member calls it with the same arguments.

        The name is that of no other communicator of the job. Members that give different ``slots`` all get Mismatch, here or
        from what they call in it.
        """
        members = tuple(range(job.world_size) if slots is None else [integer("slots", slot) for slot in slots])
        policy = policy or job.options.policy
        if job.rank not in members or len(set(members)) != len(members):
            raise ConfigError(
                f"slots={list(members)} must be different ranks, with this process's own ({job.rank}) among them."
            )
        if policy not in POLICIES:
            raise ConfigError(f"policy={policy!r} is not one of {', '.join(POLICIES)}.")
        number = communicator_id(job.name, name) if id is None else integer("id", id, signed=False)
        ffi, C = lib()
        array = ffi.new("int32_t[]", members)
        bound = job.options.operation_timeout if timeout is None else seconds("timeout", timeout)
        check(C.ft_comm_create(job.handle, number, name.encode(), array, len(members), POLICIES.index(policy), bound))
        if policy == "replay" and job.incarnation > 0:  # where the log was lost with a host, the others have it
            Request(job, len(members), None, f"the log of {name}").post(C.ft_comm_ready, job.handle, number).wait()
        job.made[number] = name
        return cls(job, number, name, members, policy)

    @property
    def _native(self) -> tuple[Any, int]:  # type: ignore[override]
        if self._closed:
            raise Closed(f"Communicator {self.name!r} was closed.")
        return self._job.handle, self.id

    @property
    def _ordered(self) -> tuple[Any, int]:  # type: ignore[override]
        """For what has its place among this rank's operations."""
        return self._native

    # -- who is there --------------------------------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """The job that it belongs to."""
        return self._job

    @property
    def epoch(self) -> int:
        """The job's epoch: one more with each change of the membership."""
        return self._job.epoch

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that take part in operations, by this communicator's last decision."""
        return self._flags("ft_comm_alive")

    def failed(self) -> tuple[int, ...]:
        """Ranks known to be dead, acknowledged or not, in the order in which this rank has heard of it; does not communicate."""
        ffi, C = lib()
        ranks, n = ffi.new("int32_t[]", self.size), ffi.new("int32_t *")
        check(C.ft_comm_failed(*self._native, ranks, n))
        return tuple(ranks[0 : n[0]])

    def ack_failed(self, n: int | None = None) -> None:
        """Acknowledges the first ``n`` of :meth:`failed` (default: all): receives from ANY work again and agree no longer
        reports them."""
        check(lib()[1].ft_comm_ack_failed(*self._native, -1 if n is None else n))

    def stats(self) -> dict[str, Any]:
        """Counters and what is in use: the job's ``info`` with this communicator's name, epoch and operation number."""
        number = int(lib()[1].ft_comm_seq(*self._native))
        return {**self._job.info(), "communicator": self.name, "operations": number, "epoch": self.epoch}

    # -- after a failure -----------------------------------------------------------------------------------------

    def revoke(self) -> None:
        """Ends every operation on all ranks of this communicator with Revoked, for good; only agree and shrink still work.

        Not collective: one rank's call is enough, also if it dies right afterwards.
        """
        check(lib()[1].ft_comm_revoke(*self._native))

    @property
    def revoked(self) -> bool:
        """Whether it was revoked, by :meth:`revoke` or by an operation's timeout."""
        return bool(lib()[1].ft_comm_revoked(*self._native))

    def iagree(self, flag: int = 1) -> Request:
        """Starts :meth:`agree`; the flag is ``request.value``."""
        request = Request(self._job, self.size, None, f"agree on {self.name}")
        return request.post(lib()[1].ft_agree, *self._native, integer("flag", flag))

    def agree(self, flag: int = 1) -> int:
        """The bitwise AND of all living ranks' flags, the same on each; works on a revoked communicator.

        Flags are integers of 64 bits with a sign, from -2**63 to 2**63-1.
        As MPIX_Comm_agree of ULFM (Bland et al. 2013), with one compare-and-set in place of a consensus protocol.

        Raises:
            PeerFailure: a rank died that not all have acknowledged (ack_failed); ``error.value`` is the flag all the same.
        """
        request = self.iagree(flag)
        request.wait()
        return request.value

    def shrink(self) -> Communicator:
        """A new communicator of the ranks that are alive, in the old order. Collective; works on a revoked communicator.

        As MPIX_Comm_shrink of ULFM (Bland et al. 2013). The old communicator remains open until it is closed.
        """
        request = Request(self._job, self.size, None, f"shrink of {self.name}")
        request.post(lib()[1].ft_shrink, *self._native)
        survivors = request.wait().contributors
        slots = [self.slots[rank] for rank in survivors]
        return Communicator.create(self._job, f"{self.name}.shrunk", slots, id=request.new_comm, policy=self.policy)

    # -- derived communicators -----------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """One communicator for each color (64-bit integers), ranks ordered by key, then by rank here. Collective.

        A rank with color None gets None. Colors and keys are from -2**63 to 2**63-1. Raises what an all_gather raises; and
        Unsupported in a replacement that is not admitted yet (policy ``lossy``): it would not have the members that the others
        have.
        """
        if self.policy != "replay" and lib()[1].ft_comm_solo(*self._native):
            raise Unsupported(
                f"split() of {self.name!r} asks all ranks for their colors, and this replacement is not admitted yet. Call it "
                "after the join point, on all ranks, or make the communicator of ranks that are known: Communicator.create()."
            )
        if color is not None:
            color = integer("color", color)
        mine = array("q", (color is not None, color or 0, integer("key", key)))
        number = int(lib()[1].ft_comm_seq(*self._ordered))
        everybody = array("q", bytes(24 * self.size))
        present = self.all_gather(everybody, mine).contributors
        if color is None:
            return None
        members = [r for r in present if everybody[3 * r] and everybody[3 * r + 1] == color]
        members.sort(key=lambda r: (everybody[3 * r + 2], r))
        name = f"{self.name}.split({color})"
        id = communicator_id(self._job.name, self.id, number, "split", color)
        return Communicator.create(self._job, name, [self.slots[r] for r in members], id=id, policy=self.policy)

    def dup(self, policy: str | None = None) -> Communicator:
        """A communicator of the same ranks with operations of its own. Collective. ``policy`` may be another one."""
        number = int(lib()[1].ft_comm_seq(*self._ordered))
        self.barrier()
        id = communicator_id(self._job.name, self.id, number, "dup")
        return Communicator.create(self._job, f"{self.name}.dup", self.slots, id=id, policy=policy or self.policy)

    # -- several at once -----------------------------------------------------------------------------------------

    def all_reduce_many(self, bufs: Sequence[Any], op: Any = "sum", **more: Any) -> list[Outcome]:
        """all_reduce of several buffers, all under way at once."""
        return wait_all([self.iall_reduce(buf, op, **more) for buf in bufs])

    @contextmanager
    def coalesce(self) -> Iterator[list[Request]]:
        """``with comm.coalesce() as group: group.append(comm.iall_reduce(a)); ...``: waits for all of the group at the end."""
        group: list[Request] = []
        yield group
        wait_all(group)

    # -- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The end of this communicator here; the job and others go on. Pending messages end with Closed, collectives as ever.

        What a vote of the others may ask for stays until the job's end: some 7 KB and its last small result, and no time.
        """
        if not self._closed and not self._job.closed:
            check(lib()[1].ft_comm_close(*self._native))
            self._closed = True
            self._no_short_way()
            self._job.made.pop(self.id, None)

    def leave(self, timeout: float | None = None) -> None:
        """A planned end of this process's part in the job: the others go on without waiting for a timeout.

        Ends the whole job in this process, all its communicators. Done at exit, too, for a job that is still open.
        """
        self._job.leave(timeout)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ftcomm.Communicator {self.name!r} rank {self.rank} of {self.size}>"

    def _flags(self, function: str) -> tuple[int, ...]:
        ffi, C = lib()
        flags = ffi.new("uint8_t[]", self.size)
        check(getattr(C, function)(*self._native, flags))
        return tuple(rank for rank, flag in enumerate(flags) if flag)
