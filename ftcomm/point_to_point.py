"""Sends and receives between two ranks of a communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcomm._lib import lib
from ftcomm.arguments import integer
from ftcomm.buffers import buffer_of
from ftcomm.errors import ConfigError
from ftcomm.request import Request

if TYPE_CHECKING:
    from ftcomm.job import Job

__all__ = ["ANY", "PointToPoint"]

ANY = -1
_ANY_OR_FAIL = -2  # ends with the failure that a receive from ANY reports and outlives


class PointToPoint:
    """Mixed into Communicator, which has the attributes below. Messages of one pair and tag keep their order."""

    _job: Job
    id: int
    name: str
    rank: int
    size: int
    policy: str
    _ordered: tuple[Any, int]  # job and id; raises Closed after close()
    _calls: Any  # as in Collectives

    def isend(self, buf: Any, dst: int, tag: int = 0, dtype: Any = None) -> Request:
        """Starts :meth:`send`; the buffer may not be changed until the request is done."""
        self._check_peer("dst", dst, any_allowed=False)
        if tag != 0:
            tag = integer("tag", tag)
        data = buffer_of(buf, writable=False, dtype=dtype)
        request = Request(self._job, self.size, data, f"send to rank {dst} on {self.name}")
        return request.post(lib()[1].ft_send, *self._ordered, data.pointer, data.nbytes, dst, tag)

    def irecv(self, buf: Any, src: int = ANY, tag: int = 0, dtype: Any = None) -> Request:
        """Starts :meth:`recv`; ``request.source`` and ``request.nbytes`` tell what came."""
        self._check_peer("src", src, any_allowed=True)
        return self._receive(buf, src, tag, dtype)

    def send(self, buf: Any, dst: int, tag: int = 0, dtype: Any = None) -> None:
        """Sends the buffer to ``dst``; returns when it may be reused, which may be before it is received.

        Small messages (FTCOMM_EAGER_LIMIT, 64 KiB) do not wait for the receive, but for room in the link, which the
        receiver's process empties by itself. Tags are 64-bit integers with a sign.

        Raises:
            PeerFailure: the receiver died.
            Timeout: no receive came, or no room, within the communicator's timeout.
        """
        self.isend(buf, dst, tag, dtype).wait()

    def recv(self, buf: Any, src: int = ANY, tag: int = 0, dtype: Any = None) -> int:
        """Receives into the buffer (a shorter message is fine, a longer one raises Truncated); returns who sent it.

        A receive from ANY raises PeerFailure, and receives nothing, while a rank that died is not acknowledged
        (:meth:`ack_failed`): it could wait for one that will never send. Who has left in good order is no failure, until
        nobody is left who could send.

        Raises:
            PeerFailure: the sender is gone, or may have died, or nobody else is left.
            Timeout: no message came within the communicator's timeout.
            Truncated: the message is longer than the buffer.
        """
        self._check_peer("src", src, any_allowed=True)
        chosen = _ANY_OR_FAIL if src == ANY else src
        request = self._receive(buf, chosen, tag, dtype)
        request.wait()
        return request.source

    def ft_send(self, buf: Any, dst: int, tag: int = 0, dtype: Any = None) -> None:
        """Sends the buffer to ``dst``, exactly once across any number of restarts of either side (policy ``replay``).

        Returns when the message is in the pair's log, from where the receiver, or its replacement, takes it. A process that
        runs again after its predecessor died sends nothing twice: what it sends is compared with the log. (Pairwise commit
        logs: Grover and Rajagopal 2022.) Under ``replay`` :meth:`send` does the same.

        Raises:
            ConfigError: the communicator has another policy.
            LogFull: the log has reached its limit; the message is not sent, and nothing is lost.
            ReplayDiverged: this run sends something else than the one before did.
        """
        self._check_logged("ft_send", "send")
        self.send(buf, dst, tag, dtype)

    def ft_recv(self, buf: Any, src: int = ANY, tag: int = 0, dtype: Any = None) -> int:
        """Receives into the buffer what :meth:`ft_send` sent, exactly once and in order; returns who sent it.

        Waits while the sender is dead: its replacement sends the same. A process that runs again receives the same messages
        in the same order; a receive from ANY gives the same source as before. Under ``replay`` :meth:`recv` does the same.

        Raises:
            ConfigError: the communicator has another policy.
            PeerFailure: the sender has left for good, or no replacement came within the communicator's timeout.
            Timeout: no message came within the communicator's timeout.
            Truncated: the message is longer than the buffer.
            LogCorrupt: the message's record in the log is damaged.
        """
        self._check_logged("ft_recv", "recv")
        return self.recv(buf, src, tag, dtype)

    def _receive(self, buf: Any, src: int, tag: int, dtype: Any) -> Request:
        if tag != 0:
            tag = integer("tag", tag)
        data = buffer_of(buf, writable=True, dtype=dtype)
        source = "any rank" if src < 0 else f"rank {src}"
        request = Request(self._job, self.size, data, f"recv from {source} on {self.name}")
        return request.post(lib()[1].ft_recv, *self._ordered, data.pointer, data.nbytes, src, tag)

    def _check_logged(self, call: str, other: str) -> None:
        if self.policy != "replay":
            raise ConfigError(
                f"{call} needs the pair log: start the job with policy='replay' (FTCOMM_POLICY, ftrun --policy replay), "
                f"or use {other}, which loses what a dead process held."
            )

    def _check_peer(self, what: str, rank: int, any_allowed: bool) -> None:
        if isinstance(rank, int) and (0 <= rank < self.size or (any_allowed and rank == ANY)):
            return
        more = ", or ftcomm.ANY" if any_allowed else ""
        raise ConfigError(f"{what}={rank!r} must be a rank of {self.name}, 0 to {self.size - 1}{more}.")
