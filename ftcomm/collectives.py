"""The collective calls of a communicator: ``i<name>`` posts and returns a Request, ``<name>`` waits for it.

Where a call has an output, it comes first, as in torch.distributed. Counts are elements. Every call may be given ``timeout=``
(seconds until ranks that are alive but did not enter are named in a Timeout) and ``dtype=`` (what raw bytes hold).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ftcomm._lib import lib
from ftcomm.arguments import integer, real, seconds
from ftcomm.buffers import Buffer, buffer_of
from ftcomm.dtypes import OPS, dtype_name, dtype_number, op_number
from ftcomm.errors import ConfigError, Unsupported
from ftcomm.request import Outcome, Request

if TYPE_CHECKING:
    from ftcomm.job import Job

__all__ = ["ALGORITHMS", "Collectives"]

ALGORITHMS = {"auto": 0, "ring": 1, "flat": 2, "ring-logged": 4}
_ALL_REDUCE, _BROADCAST, _REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _GATHER, _SCATTER, _ALL_TO_ALL, _BARRIER = range(9)
_NOTHING = Buffer(None, 0, dtype_number("uint8"), None)


class Collectives:
    """Mixed into Communicator, which has the attributes below."""

    _job: Job
    id: int
    name: str
    rank: int
    size: int
    _ordered: tuple[Any, int]  # job and id; raises Closed after close()
    _calls: Any  # of the compiled methods: see _calls.py

    # -- asynchronous --------------------------------------------------------------------------------------------

    def iall_reduce(
        self,
        buf: Any,
        op: Any = "sum",
        algorithm: str = "auto",
        dtype: Any = None,
        *,
        factor: float = 1.0,
        timeout: float | None = None,
    ) -> Request:
        """Starts :meth:`all_reduce`; the buffer may not be touched until the request is done."""
        data = buffer_of(buf, writable=True, dtype=dtype)
        return self._collective(
            _ALL_REDUCE, data, recv=data, op=op, algorithm=algorithm, factor=factor, timeout=timeout
        )

    def ibroadcast(self, buf: Any, root: int = 0, dtype: Any = None, *, timeout: float | None = None) -> Request:
        """Starts :meth:`broadcast`."""
        self._check_rank("root", root)
        data = buffer_of(buf, writable=root != self.rank, dtype=dtype)
        return self._collective(_BROADCAST, data, recv=data, root=root, timeout=timeout)

    def ireduce(
        self,
        buf: Any,
        root: int = 0,
        op: Any = "sum",
        dtype: Any = None,
        *,
        factor: float = 1.0,
        timeout: float | None = None,
    ) -> Request:
        """Starts :meth:`reduce`."""
        self._check_rank("root", root)
        data = buffer_of(buf, writable=root == self.rank, dtype=dtype)
        recv = data if root == self.rank else None
        return self._collective(_REDUCE, data, send=data, recv=recv, root=root, op=op, factor=factor, timeout=timeout)

    def iall_gather(self, out: Any, buf: Any, dtype: Any = None, *, timeout: float | None = None) -> Request:
        """Starts :meth:`all_gather`."""
        data = buffer_of(buf, what="input", writable=False, dtype=dtype)
        recv = buffer_of(out, what="output", writable=True, dtype=dtype)
        self._check_output(recv, data, self.size * data.count, f"size * input = {self.size} * {data.count}")
        return self._collective(_ALL_GATHER, data, send=data, recv=recv, timeout=timeout)

    def ireduce_scatter(
        self,
        out: Any,
        buf: Any,
        op: Any = "sum",
        dtype: Any = None,
        *,
        factor: float = 1.0,
        timeout: float | None = None,
    ) -> Request:
        """Starts :meth:`reduce_scatter`."""
        data = buffer_of(buf, what="input", writable=False, dtype=dtype)
        recv = buffer_of(out, what="output", writable=True, dtype=dtype)
        self._check_output(data, recv, self.size * recv.count, f"size * output = {self.size} * {recv.count}", "input")
        return self._collective(_REDUCE_SCATTER, recv, send=data, recv=recv, op=op, factor=factor, timeout=timeout)

    def igather(
        self,
        buf: Any,
        out: Any = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        dtype: Any = None,
        *,
        timeout: float | None = None,
    ) -> Request:
        """Starts :meth:`gather`."""
        self._check_rank("root", root)
        data = buffer_of(buf, what="input", writable=False, dtype=dtype)
        recv, given = None, None
        if root == self.rank:
            recv = self._root_side(out, "output", True, data, dtype)
            given = self._counts("counts", counts, recv.count, data.count)
            if given[self.rank] != data.count:
                raise ConfigError(f"counts[{self.rank}]={given[self.rank]}, but this rank gives {data.count} elements.")
        return self._collective(_GATHER, data, send=data, recv=recv, root=root, recv_counts=given, timeout=timeout)

    def iscatter(
        self,
        out: Any,
        buf: Any = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        dtype: Any = None,
        *,
        timeout: float | None = None,
    ) -> Request:
        """Starts :meth:`scatter`."""
        self._check_rank("root", root)
        recv = buffer_of(out, what="output", writable=True, dtype=dtype)
        send, given = None, None
        if root == self.rank:
            send = self._root_side(buf, "input", False, recv, dtype)
            given = self._counts("counts", counts, send.count, recv.count)
            if given[self.rank] != recv.count:
                raise ConfigError(f"counts[{self.rank}]={given[self.rank]}, but this rank takes {recv.count} elements.")
        return self._collective(_SCATTER, recv, send=send, recv=recv, root=root, send_counts=given, timeout=timeout)

    def iall_to_all(
        self,
        out: Any,
        buf: Any,
        out_counts: Sequence[int] | None = None,
        in_counts: Sequence[int] | None = None,
        dtype: Any = None,
        *,
        timeout: float | None = None,
    ) -> Request:
        """Starts :meth:`all_to_all`."""
        send = buffer_of(buf, what="input", writable=False, dtype=dtype)
        recv = buffer_of(out, what="output", writable=True, dtype=dtype)
        self._check_types(recv, send)
        if out_counts is None and in_counts is None:
            self._check_output(recv, send, send.count, f"input = {send.count}")
            if send.count % self.size != 0:
                raise ConfigError(
                    f"The input has {send.count} elements, which is no multiple of the {self.size} ranks. "
                    "Give out_counts= and in_counts=."
                )
            each = send.count // self.size
            return self._collective(_ALL_TO_ALL, send, send=send, recv=recv, count=each, timeout=timeout)
        if out_counts is None or in_counts is None:
            raise ConfigError("all_to_all with uneven parts needs both out_counts= and in_counts=.")
        sends = self._counts("in_counts", in_counts, send.count, 0)
        recvs = self._counts("out_counts", out_counts, recv.count, 0)
        return self._collective(
            _ALL_TO_ALL, send, send=send, recv=recv, count=0, send_counts=sends, recv_counts=recvs, timeout=timeout
        )

    def ibarrier(self, *, timeout: float | None = None) -> Request:
        """Starts :meth:`barrier`."""
        return self._collective(_BARRIER, _NOTHING, timeout=timeout)

    # -- blocking ------------------------------------------------------------------------------------------------

    def all_reduce(self, buf: Any, op: Any = "sum", algorithm: str = "auto", dtype: Any = None, **more: Any) -> Outcome:
        """Combines the buffers of all ranks element by element, in place; bitwise the same result everywhere.

        ``ring`` is the ring of Patarasuk and Yuan (2009) with a fence at its end; ``flat``, for small buffers,
        sends everything to everyone and adds in rank order (of many ranks: along a tree, part by part). From 4 MiB
        on, ranks of one host read each other's memory instead (``auto``), and add in rank order, too (up to 4 of them on
        processors of AMD not: see FTCOMM_STREAM_LIMIT in docs/operations.md). Those that share its processors
        go by windows of shared memory from smaller sizes on, and add in the order that they would add in without
        (FTCOMM_STAGE_LIMIT).
        An average is divided by the number of contributors, part by part.

        Args:
            buf: the same number of elements and type on every rank.
            op: sum, avg, product, min, max, band, bor, bxor, or premul_sum (with ``factor=``: each input times it).
            algorithm: auto (by size, number of ranks, and whether they may read each other's memory), ring, flat; the same on
                every rank. What is too large for ``flat`` goes as with ``auto``. Under the policy replay also ring-logged: a
                chain of logged sends and receives (Grover and Rajagopal 2022), for comparison; it logs 2(n-1) times as much,
                and after an error in one (a timeout, unequal sizes) no other works on this communicator.

        Raises:
            Unsupported: the operator is not defined for the type; see the table in docs/operations.md.
        """
        return self.iall_reduce(buf, op, algorithm, dtype, **more).wait()

    def broadcast(self, buf: Any, root: int = 0, dtype: Any = None, **more: Any) -> Outcome:
        """Copies the root's buffer into every rank's, which has as many elements. No rank returns before all have entered."""
        return self.ibroadcast(buf, root, dtype, **more).wait()

    def reduce(self, buf: Any, root: int = 0, op: Any = "sum", dtype: Any = None, **more: Any) -> Outcome:
        """As all_reduce, but only the root's buffer is overwritten with the result; the others' stay as they are."""
        return self.ireduce(buf, root, op, dtype, **more).wait()

    def all_gather(self, out: Any, buf: Any, dtype: Any = None, **more: Any) -> Outcome:
        """``out`` (size times the elements of ``buf``) gets every rank's ``buf``, in rank order."""
        return self.iall_gather(out, buf, dtype, **more).wait()

    def reduce_scatter(self, out: Any, buf: Any, op: Any = "sum", dtype: Any = None, **more: Any) -> Outcome:
        """Combines ``buf`` (size times the elements of ``out``); rank r gets part r in ``out``; ``op`` as in all_reduce."""
        return self.ireduce_scatter(out, buf, op, dtype, **more).wait()

    def gather(
        self, buf: Any, out: Any = None, root: int = 0, counts: Sequence[int] | None = None, **more: Any
    ) -> Outcome:
        """The root's ``out`` gets every rank's ``buf``, in rank order; ``counts`` (at the root) where they differ in size."""
        return self.igather(buf, out, root, counts, **more).wait()

    def scatter(
        self, out: Any, buf: Any = None, root: int = 0, counts: Sequence[int] | None = None, **more: Any
    ) -> Outcome:
        """Rank r's ``out`` gets the r-th part of the root's ``buf``; ``counts`` (at the root) where parts differ in size."""
        return self.iscatter(out, buf, root, counts, **more).wait()

    def all_to_all(self, out: Any, buf: Any, *args: Any, **more: Any) -> Outcome:
        """Part r of ``buf`` goes to rank r; ``out`` gets the parts for this rank, in rank order.

        Parts are equal, or as ``out_counts`` (elements from each rank) and ``in_counts`` (elements to each rank) say. Small parts
        are faster without counts. Where some ranks give counts and some do not, all have to agree first, which costs a vote.
        """
        return self.iall_to_all(out, buf, *args, **more).wait()

    def barrier(self, **more: Any) -> Outcome:
        """Returns after every rank has entered. More than 8 (of one host: 4): along a tree."""
        return self.ibarrier(**more).wait()

    # -- common --------------------------------------------------------------------------------------------------

    def _collective(
        self,
        kind: int,
        typed: Buffer,
        *,
        send: Buffer | None = None,
        recv: Buffer | None = None,
        root: int = 0,
        op: Any = "sum",
        algorithm: str = "auto",
        count: int | None = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        factor: float = 1.0,
        timeout: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Request:
        ffi, C = lib()
        described = ffi.new("ft_op*")
        described.kind, described.dtype, described.root = kind, typed.dtype, root
        described.count = typed.count if count is None else count
        if op != "sum":
            described.op = op_number(op)
        if algorithm != "auto":
            described.algorithm = _algorithm(algorithm)
        if kind in (_ALL_REDUCE, _REDUCE, _REDUCE_SCATTER) and not _supported(typed.dtype, described.op):
            raise Unsupported(
                f"op {op!r} is not defined for {dtype_name(typed.dtype)}; see the table in docs/operations.md."
            )
        if send is not None:
            described.send = send.pointer
        if recv is not None:
            described.recv = recv.pointer
        arrays = None
        if send_counts is not None or recv_counts is not None:
            arrays = [_layout(described, "send", send_counts), _layout(described, "recv", recv_counts)]
        described.factor = real("factor", factor)
        if described.factor != 1.0 and described.op != OPS["premul_sum"]:
            raise ConfigError(
                f"factor={factor} has no part in op {op!r}. Use op='premul_sum', or multiply the buffer before."
            )
        if timeout is not None:
            described.timeout = seconds("timeout", timeout)
        request = Request(self._job, self.size, (send, recv, arrays), f"{_NAMES[kind]} on {self.name}", finish)
        return request.post(C.ft_collective, *self._ordered, described)

    def _check_rank(self, what: str, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ConfigError(f"{what}={rank!r} must be a rank of {self.name}, 0 to {self.size - 1}.")

    def _check_types(self, one: Buffer, other: Buffer) -> None:
        if one.dtype != other.dtype:
            raise ConfigError(
                f"Input and output have different types ({dtype_name(other.dtype)}, {dtype_name(one.dtype)}); "
                "they must be the same."
            )

    def _check_output(self, big: Buffer, small: Buffer, count: int, rule: str, what: str = "output") -> None:
        self._check_types(big, small)
        if big.count != count:
            raise ConfigError(f"The {what} has {big.count} elements; it must have {rule}.")

    def _root_side(self, thing: Any, what: str, writable: bool, like: Buffer, dtype: Any) -> Buffer:
        if thing is None:
            raise ConfigError(
                f"The root (rank {self.rank}) must give the {what}; only the other ranks may leave it out."
            )
        found = buffer_of(thing, what=what, writable=writable, dtype=dtype)
        self._check_types(found, like)
        return found

    def _counts(self, what: str, counts: Sequence[int] | None, total: int, each: int) -> list[int]:
        given = [each] * self.size if counts is None else [integer(what, count) for count in counts]
        if len(given) != self.size or min(given) < 0:
            raise ConfigError(f"{what}={given} must have one number, not negative, for each of the {self.size} ranks.")
        if sum(given) != total:
            raise ConfigError(f"{what}={given} add up to {sum(given)} elements, but the buffer has {total}.")
        return given


_NAMES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier",
)  # fmt: skip


@functools.cache
def _supported(dtype: int, op: int) -> bool:
    return bool(lib()[1].ft_reduce_supported(dtype, op))


def _algorithm(name: str) -> int:
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm={name!r} is not one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[name]


def _layout(described: Any, side: str, counts: Sequence[int] | None) -> Any:
    """Sets counts and packed offsets of one side; the returned arrays must live as long as the request."""
    if counts is None:
        return None
    ffi, _ = lib()
    offsets = [sum(counts[:index]) for index in range(len(counts))]
    arrays = ffi.new("uint64_t[]", counts), ffi.new("uint64_t[]", offsets)
    setattr(described, side + "_counts", arrays[0])
    setattr(described, side + "_offsets", arrays[1])
    return arrays
