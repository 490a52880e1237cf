"""The module-level functions: a default communicator and torch.distributed's argument order.

``ftcomm.all_reduce(tensor, op)`` and its like are the calls of the same name on the communicator that :func:`init` made, so that
a program changes only the prefix of its calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from ftcomm._lib import lib
from ftcomm.arguments import seconds
from ftcomm.buffers import Buffer, buffer_of
from ftcomm.communicator import Communicator
from ftcomm.dtypes import dtype_name
from ftcomm.errors import ConfigError
from ftcomm.options import Options
from ftcomm.request import Outcome, Request

_default: list[Communicator] = []


def init(
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str = "auto",
    options: Options | None = None,
    *,
    store: Any = None,
    job: str | None = None,
    incarnation: int | None = None,
    timeout: float | None = None,
) -> Communicator:
    """Starts this process's part of a job; returns the communicator of all ranks, also the default one of this module.

    Args:
        rank, world_size: default: from the environment (RANK, WORLD_SIZE) or from MPI.
        init_method: ``auto`` (RANK and WORLD_SIZE set: env://, else under an MPI launcher: mpi://), ``env://`` (MASTER_ADDR and
            MASTER_PORT; rank 0 hosts the store, or the launcher's agent does), ``tcp://HOST:PORT``, ``file:///PATH``, ``mpi://``.
        store: instead of an init method: a torch Store or an ``ftcomm.stores.Store``; needs rank and world_size.
        job: unique name of the job in the store (default FTCOMM_JOB, else the launcher's run id).
        incarnation: default FTCOMM_INCARNATION; above 0 this process replaces a dead one.
        timeout: seconds for the start (default: the options' timeout).

    Raises:
        Timeout: ``missing`` names the ranks that never came.
        ConfigError: something in the arguments or the environment is wrong.
    """
    from ftcomm import init_methods
    from ftcomm.rendezvous import job_name, start_job

    options = options or Options()
    bound = options.operation_timeout if timeout is None else seconds("timeout", timeout)
    if store is None:
        meeting = init_methods.find(init_method, rank, world_size, options, bound)
    elif rank is None or world_size is None:
        raise ConfigError("init(store=...) needs rank= and world_size= too.")
    else:
        meeting = init_methods.Meeting(store, rank, world_size)
    if meeting.secret is not None:
        options = dataclasses.replace(options, secret=meeting.secret)
    name = job or meeting.job or job_name()
    with meeting.watch(name) if meeting.watch is not None else nullcontext():
        started = start_job(
            meeting.store,
            meeting.rank,
            meeting.world_size,
            options,
            job=name,
            incarnation=incarnation,
            timeout=bound,
        )
    try:
        world = Communicator.create(started)
    except BaseException:
        started.close()
        raise
    _default[:] = [world]
    return world


def is_initialized() -> bool:
    """Whether :func:`init` has been called (and the job not left)."""
    return bool(_default) and not _default[0].job.closed


def default_communicator() -> Communicator:
    """The communicator of :func:`init`.

    Raises:
        ConfigError: init was not called, or the job has ended.
    """
    if not is_initialized():
        raise ConfigError("There is no job in this process. Call ftcomm.init() first.")
    return _default[0]


def leave(timeout: float | None = None) -> None:
    """Leaves the default communicator's job; nothing to do if there is none."""
    if is_initialized():
        _default[0].leave(timeout)
        _default.clear()


def get_rank() -> int:
    """This process's rank in the default communicator."""
    return default_communicator().rank


def get_world_size() -> int:
    """The size of the default communicator."""
    return default_communicator().size


def send(tensor: Any, dst: int, tag: int = 0) -> None:
    """:meth:`Communicator.send` on the default communicator."""
    default_communicator().send(tensor, dst, tag)


def recv(tensor: Any, src: int | None = None, tag: int = 0) -> int:
    """:meth:`Communicator.recv`; ``src`` None receives from any rank. Returns who sent."""
    return default_communicator().recv(tensor, -1 if src is None else src, tag)


def isend(tensor: Any, dst: int, tag: int = 0) -> Request:
    """:meth:`Communicator.isend` on the default communicator."""
    return default_communicator().isend(tensor, dst, tag)


def irecv(tensor: Any, src: int | None = None, tag: int = 0) -> Request:
    """:meth:`Communicator.irecv` on the default communicator; ``src`` None receives from any rank."""
    return default_communicator().irecv(tensor, -1 if src is None else src, tag)


def ft_send(tensor: Any, dst: int, tag: int = 0) -> None:
    """:meth:`Communicator.ft_send` on the default communicator."""
    default_communicator().ft_send(tensor, dst, tag)


def ft_recv(tensor: Any, src: int | None = None, tag: int = 0) -> int:
    """:meth:`Communicator.ft_recv` on the default communicator; ``src`` None receives from any rank."""
    return default_communicator().ft_recv(tensor, -1 if src is None else src, tag)


def all_reduce(tensor: Any, op: Any = "sum", async_op: bool = False) -> Outcome | Request:
    """:meth:`Communicator.all_reduce`; with ``async_op`` a Request, else the Outcome, as in all calls below."""
    return _finish(default_communicator().iall_reduce(tensor, op), async_op)


def ft_all_reduce(tensor: Any, op: Any = "sum", async_op: bool = False) -> Outcome | Request:
    """The same as :func:`all_reduce`: every all-reduce survives deaths as the communicator's policy says."""
    return all_reduce(tensor, op, async_op)


def broadcast(tensor: Any, src: int, async_op: bool = False) -> Outcome | Request:
    """:meth:`Communicator.broadcast` from rank ``src``."""
    return _finish(default_communicator().ibroadcast(tensor, src), async_op)


def reduce(tensor: Any, dst: int, op: Any = "sum", async_op: bool = False) -> Outcome | Request:
    """:meth:`Communicator.reduce` to rank ``dst``."""
    return _finish(default_communicator().ireduce(tensor, dst, op), async_op)


def all_gather_into_tensor(output: Any, input: Any, async_op: bool = False) -> Outcome | Request:
    """:meth:`Communicator.all_gather`."""
    return _finish(default_communicator().iall_gather(output, input), async_op)


def reduce_scatter_tensor(output: Any, input: Any, op: Any = "sum", async_op: bool = False) -> Outcome | Request:
    """:meth:`Communicator.reduce_scatter`."""
    return _finish(default_communicator().ireduce_scatter(output, input, op), async_op)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Outcome | Request:
    """:meth:`Communicator.all_to_all`; split sizes in elements."""
    request = default_communicator().iall_to_all(output, input, output_split_sizes, input_split_sizes)
    return _finish(request, async_op)


def barrier(async_op: bool = False) -> Outcome | Request:
    """:meth:`Communicator.barrier`."""
    return _finish(default_communicator().ibarrier(), async_op)


def all_gather(tensor_list: Sequence[Any], tensor: Any) -> Outcome:
    """``tensor_list[r]`` gets rank r's ``tensor``; ``size`` entries of its type and number of elements. Blocking."""
    comm = default_communicator()
    parts, mine, packed = _list_of(comm, tensor_list, tensor, "tensor_list", writable=True)
    outcome = comm.all_gather(packed, tensor, dtype=dtype_name(mine.dtype))
    _unpack(parts, packed)
    return outcome


def gather(tensor: Any, gather_list: Sequence[Any] | None = None, dst: int = 0) -> Outcome:
    """``gather_list[r]`` at rank ``dst`` gets rank r's ``tensor``; all of the same type and number of elements. Blocking."""
    comm = default_communicator()
    if comm.rank != dst or gather_list is None:
        return comm.gather(tensor, None, dst)
    parts, mine, packed = _list_of(comm, gather_list, tensor, "gather_list", writable=True)
    outcome = comm.gather(tensor, packed, dst, dtype=dtype_name(mine.dtype))
    _unpack(parts, packed)
    return outcome


def scatter(tensor: Any, scatter_list: Sequence[Any] | None = None, src: int = 0) -> Outcome:
    """Rank r's ``tensor`` gets ``scatter_list[r]`` of rank ``src``; all of the same type and number of elements. Blocking."""
    comm = default_communicator()
    if comm.rank != src or scatter_list is None:
        return comm.scatter(tensor, None, src)
    parts, mine, packed = _list_of(comm, scatter_list, tensor, "scatter_list", writable=False)
    _pack(packed, parts)
    return comm.scatter(tensor, packed, src, dtype=dtype_name(mine.dtype))


def reduce_scatter(output: Any, input_list: Sequence[Any], op: Any = "sum") -> Outcome:
    """Rank r's ``output`` gets the combination of all ranks' ``input_list[r]``; all of the same size. Blocking."""
    comm = default_communicator()
    parts, mine, packed = _list_of(comm, input_list, output, "input_list", writable=False)
    _pack(packed, parts)
    return comm.reduce_scatter(output, packed, op, dtype=dtype_name(mine.dtype))


def _finish(request: Request, async_op: bool) -> Outcome | Request:
    return request if async_op else request.wait()


def _list_of(
    comm: Communicator, things: Sequence[Any], like: Any, what: str, writable: bool
) -> tuple[list[Buffer], Buffer, bytearray]:
    """The list's buffers, checked to be as many as ranks and like ``like``, and room for all of them together."""
    mine = buffer_of(like, writable=False)
    parts = [buffer_of(thing, what=f"{what}[{i}]", writable=writable) for i, thing in enumerate(things)]
    if len(parts) != comm.size:
        raise ConfigError(f"{what} has {len(parts)} entries; it must have one for each of the {comm.size} ranks.")
    for i, part in enumerate(parts):
        if (part.count, part.dtype) != (mine.count, mine.dtype):
            raise ConfigError(
                f"{what}[{i}] has {part.count} elements of {dtype_name(part.dtype)}; it must be like the tensor, "
                f"{mine.count} of {dtype_name(mine.dtype)}."
            )
    return parts, mine, bytearray(mine.nbytes * comm.size)


def _pack(packed: bytearray, parts: list[Buffer]) -> None:
    ffi, _ = lib()
    size = parts[0].nbytes
    for i, part in enumerate(parts):
        packed[i * size : (i + 1) * size] = ffi.buffer(part.pointer, size)


def _unpack(parts: list[Buffer], packed: bytearray) -> None:
    ffi, _ = lib()
    size = parts[0].nbytes
    for i, part in enumerate(parts):
        ffi.memmove(part.pointer, packed[i * size : (i + 1) * size], size)
