"""Operations under way and what became of them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcomm._lib import check, last_error, lib
from ftcomm.arguments import real
from ftcomm.errors import Closed, Timeout
from ftcomm.exit_code import end_with_group

if TYPE_CHECKING:
    from ftcomm.job import Job

__all__ = ["Outcome", "Request", "as_usual", "finish_now", "orphans", "prune_orphans", "wait_all", "whole"]

FT_PEER_FAILURE, FT_TIMEOUT, FT_INTERRUPTED, FT_CANCELLED = 1, 5, 8, 13
_LOOK = -1  # of the calls that wait: done, but not as usual

# Operations that were dropped before they were done still write into their buffers: both are kept until they are.
orphans: list[tuple[Any, Any, Any]] = []
_pruning = threading.RLock()
_busy = False  # in it: a signal's handler that posts leaves them alone


@dataclass(frozen=True)
class Outcome:
    """What a finished operation did.

    Attributes:
        contributors: the communicator ranks whose data is in every part of the result.
        chunks: ``(offset, count, contributors)`` for each part, offset and count in elements; more than one only when a rank
            died in the middle under the policy ``lossy``.
        epoch: the job's epoch when the operation completed.
    """

    contributors: tuple[int, ...]
    chunks: tuple[tuple[int, int, tuple[int, ...]], ...]
    epoch: int


class Request:
    """An operation that was posted. Dropping it does not cancel the operation.

    Attributes (once it is done):
        source: receives: the rank that sent.
        nbytes: receives: how many bytes came.
    """

    # Of a request that is not done. Setting them on each would take as long as the rest of it.
    _done = False
    _error: Exception | None = None
    _outcome: Outcome | None = None
    _finish: Callable[[], None] | None = None
    source = -1
    nbytes = 0
    value = 0
    new_comm = 0

    def __init__(
        self, job: Job, size: int, keep: Any, operation: str, finish: Callable[[], None] | None = None
    ) -> None:
        self._job, self._handle, self._size, self._keep = job, None, size, keep
        self.operation = operation
        if finish is not None:
            self._finish = finish
        prune_orphans()

    def post(self, call: Callable[..., int], *arguments: Any) -> Request:
        """Posts the operation by ``call(*arguments, out)`` of the C interface.

        Where a signal's exception comes as soon as it is posted, it is given up as in :meth:`wait`, and not forgotten.
        """
        ffi, _ = lib()
        out = ffi.new("ft_request**")
        try:
            check(call(*arguments, out))
            self._handle = out[0]
        except BaseException:
            if out[0] != ffi.NULL:
                self._handle = out[0]
                self._give_up()
            raise
        return self

    def wait(self, timeout: float | None = None) -> Outcome:
        """Blocks until the operation is done and returns its outcome, or raises its error.

        With ``timeout`` (seconds) it raises Timeout when nothing was decided by then; the operation goes on, and wait may be
        called again. A receive from ANY raises PeerFailure while a death is not acknowledged, and stays pending: wait again after
        ``ack_failed()`` (it ends when nobody is left who could send). Ctrl-C gives the operation up: its failure is proposed to
        the other ranks, the result (which may be success) is waited for up to two heartbeats, then KeyboardInterrupt goes on.
        """
        if not self._done:
            deadline = None if timeout is None else time.monotonic() + real("timeout", timeout, "a number of seconds")
            try:
                self._wait_until(deadline)
            except BaseException as error:
                if not isinstance(error, Exception):
                    self._give_up()
                raise
        return self._result()

    def test(self) -> bool:
        """Whether the operation is done (with success or with an error); never blocks."""
        if not self._done:
            ffi, C = lib()
            done = ffi.new("int32_t*")
            code = C.ft_request_test(self._open(), done)
            if done[0]:
                self._complete(code)
        return self._done

    def cancel(self) -> None:
        """Proposes the failure of the operation to the other ranks; wait() then raises, or returns if it succeeded first."""
        if not self._done:
            lib()[1].ft_request_fail(self._open(), FT_CANCELLED)

    @property
    def error(self) -> Exception | None:
        """The error of a finished operation, or None."""
        return self._error

    # ------------------------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        self._job.handle  # noqa: B018 - raises after close and in a forked child
        return self._handle

    def _wait_until(self, deadline: float | None) -> None:
        ffi, C = lib()
        # A signal that comes after Python has last looked for one, but before the C side sleeps, wakes nobody: so the sleep is
        # cut into pieces, and Ctrl-C is never lost.
        piece = self._job.options.heartbeat
        result, flags = ffi.new("ft_result*"), ffi.new("uint8_t[]", self._size)
        while True:
            left = piece if deadline is None else max(0.0, deadline - time.monotonic())
            code = C.ft_request_finish(self._open(), min(left, piece), result, flags, self._size)
            if code == 0:
                self._succeed(result, flags)
                return
            # A signal's Python handler runs between these lines of Python, and may raise.
            if code in (FT_PEER_FAILURE, FT_INTERRUPTED, FT_TIMEOUT):
                alarm = last_error(code) if code == FT_PEER_FAILURE else None
                done = ffi.new("int32_t*")
                after = C.ft_request_test(self._handle, done)
                if not done[0]:
                    if alarm is not None:
                        raise alarm
                    if code == FT_TIMEOUT and left <= piece and deadline is not None:
                        raise Timeout(
                            f"{self.operation} was not decided within the time of this wait; it is still pending.",
                            operation=self.operation,
                        )
                    continue
                code = after
            self._complete(code)
            return

    def _give_up(self) -> None:
        if self._done or self._job.closed:
            return
        _, C = lib()
        C.ft_request_fail(self._handle, FT_INTERRUPTED)
        deadline = time.monotonic() + 2 * self._job.options.heartbeat
        while not self._done and time.monotonic() < deadline:
            try:
                self._wait_until(deadline)
            except (KeyboardInterrupt, Timeout):
                continue

    def _complete(self, code: int) -> None:
        """It is done, with this code."""
        ffi, C = lib()
        result, flags = ffi.new("ft_result*"), ffi.new("uint8_t[]", self._size)
        if code == 0:
            C.ft_request_result(self._handle, result)
            C.ft_request_ranks(self._handle, flags, self._size)
            self._succeed(result, flags)
            return
        error = last_error(code)
        end_with_group(error)
        C.ft_request_result(self._handle, result)
        error.value = result.value if self.operation.startswith("agree") else None
        self._error = error
        self._close(result)
        self._finish = None

    def _succeed(self, result: Any, flags: Any) -> None:
        ranks = _set(flags)
        if result.chunks == 1:
            self._outcome = whole(ranks, result.offset, result.count, result.epoch)
        else:
            self._outcome = Outcome(ranks, self._chunks(result.chunks), result.epoch)
        self._close(result)
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _close(self, result: Any) -> None:
        self.source, self.nbytes, self.value = result.source, result.bytes, result.value
        self.new_comm = result.new_comm
        self._done = True
        # Forgotten before it is freed: a signal's exception may come right after the call.
        handle, self._handle, self._keep = self._handle, None, None
        lib()[1].ft_request_free(handle)

    def _chunks(self, number: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        if number == 0:
            return ()
        ffi, C = lib()
        flags, offset, count = ffi.new("uint8_t[]", self._size), ffi.new("uint64_t*"), ffi.new("uint64_t*")
        chunks = []
        for index in range(number):
            C.ft_request_chunk(self._handle, index, offset, count, flags, self._size)
            chunks.append((offset[0], count[0], _set(flags)))
        return tuple(chunks)

    def _result(self) -> Outcome:
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and not self._job.closed:
            orphans.append((self._job, handle, self._keep))


@functools.lru_cache(maxsize=64)
def _ranks(flags: bytes) -> tuple[int, ...]:
    return tuple(rank for rank, flag in enumerate(flags) if flag)


@functools.lru_cache(maxsize=64)
def whole(ranks: tuple[int, ...], offset: int, count: int, epoch: int) -> Outcome:
    """Of one part, as nearly all are: the same object again and again."""
    return Outcome(ranks, ((offset, count, ranks),), epoch)


def as_usual(ranks: tuple[int, ...], chunks: int, offset: int, count: int, epoch: int, only: int) -> Outcome:
    """Of one part, of all ranks or of ``only`` (a broadcast's root); of a part of each rank (all-gather); or of none."""
    if chunks > 1:
        return Outcome(ranks, tuple((rank * count, count, (rank,)) for rank in ranks), epoch)
    return whole(ranks if only < 0 else (only,), offset, count, epoch) if chunks else Outcome(ranks, (), epoch)


def finish_now(request: Request, code: int) -> Outcome:
    """Of a compiled call whose operation was begun, and has not ended as usual."""
    try:
        if code not in (FT_PEER_FAILURE, FT_TIMEOUT, FT_INTERRUPTED):
            request._complete(0 if code == _LOOK else code)
    except BaseException as error:
        if not isinstance(error, Exception):
            request._give_up()
        raise
    return request.wait()


def _set(flags: Any) -> tuple[int, ...]:
    return _ranks(bytes(lib()[0].buffer(flags)))


def prune_orphans() -> None:
    """Lets go of those that are done. Each is off the list before it is freed: a signal's exception may come between."""
    global _busy
    if not orphans:
        return
    with _pruning:
        if _busy:
            return
        _busy = True
        try:
            _prune()
        finally:
            _busy = False


def _prune() -> None:
    ffi, C = lib()
    done = ffi.new("int32_t*")
    place = 0
    while place < len(orphans):  # others may add to its end, and nobody else takes one away
        job, handle, _ = orphans[place]
        try:
            job.handle  # noqa: B018
        except Closed:
            del orphans[place]
            continue
        C.ft_request_test(handle, done)
        if done[0]:
            del orphans[place]
            C.ft_request_free(handle)
        else:
            place += 1


def wait_all(requests: list[Request], timeout: float | None = None) -> list[Outcome]:
    """Waits for all; raises the first error (in the order of ``requests``) after all are done."""
    deadline = None if timeout is None else time.monotonic() + real("timeout", timeout, "a number of seconds")
    first: Exception | None = None
    for request in requests:
        try:
            request.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Exception as error:
            if not request._done:
                raise
            first = first or error
    if first is not None:
        raise first
    return [request.wait() for request in requests]
