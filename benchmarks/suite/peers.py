"""Who is measured: each makes an operation's call for given buffers."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from suite.operations import Buffers, Call


class Ftcomm:
    """The direct API, of NumPy's or torch's buffers."""

    def __init__(self, comm: Any, args: argparse.Namespace) -> None:
        self.comm, self.op, self.algorithm = comm, args.op, args.algorithm

    def call(self, kind: str, b: Buffers) -> Call:
        c = self.comm
        two = c.rank < c.size - c.size % 2
        calls: dict[str, Call] = {
            "all_reduce": lambda: c.all_reduce(b.big, self.op, self.algorithm),
            "reduce": lambda: c.reduce(b.big, 0, self.op),
            "broadcast": lambda: c.broadcast(b.big),
            "all_gather": lambda: c.all_gather(b.big, b.small),
            "reduce_scatter": lambda: c.reduce_scatter(b.small, b.big, self.op),
            "all_to_all": lambda: c.all_to_all(b.other, b.big),
            "barrier": c.barrier,
            "send_recv": _ping_pong(c.rank, two, lambda to: c.send(b.big, to), lambda who: c.recv(b.other, who)),
        }
        return calls[kind]


class Torch:
    """A process group of torch.distributed, ftcomm's or gloo's."""

    def __init__(self, group: Any, args: argparse.Namespace) -> None:
        import torch.distributed as dist

        self.group = group
        self.op = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(args.op, args.op.upper()))

    def call(self, kind: str, b: Buffers) -> Call:
        import torch.distributed as dist

        g, op = self.group, self.op
        rank, size = g.rank(), g.size()
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(b.big, op, g),
            "reduce": lambda: dist.reduce(b.big, 0, op, g),
            "broadcast": lambda: dist.broadcast(b.big, 0, g),
            "all_gather": lambda: dist.all_gather_into_tensor(b.big, b.small, g),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(b.small, b.big, op, g),
            "all_to_all": lambda: dist.all_to_all_single(b.other, b.big, group=g),
            "barrier": lambda: dist.barrier(g),
            "send_recv": _ping_pong(
                rank, rank < size - size % 2, lambda to: dist.send(b.big, to, g), lambda who: dist.recv(b.other, who, g)
            ),
        }
        return calls[kind]


class Mpi:
    """Open MPI by mpi4py, of buffers."""

    def __init__(self, comm: Any, args: argparse.Namespace) -> None:
        from mpi4py import MPI

        self.comm, self.mpi = comm, MPI
        self.op = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}[args.op]

    def call(self, kind: str, b: Buffers) -> Call:
        c, here = self.comm, self.mpi.IN_PLACE
        big, small, other = (t.numpy() for t in (b.big, b.small, b.other))
        root = c.rank == 0
        two = c.rank < c.size - c.size % 2
        calls: dict[str, Call] = {
            "all_reduce": lambda: c.Allreduce(here, big, self.op),
            "reduce": lambda: c.Reduce(here if root else big, big if root else None, self.op),
            "broadcast": lambda: c.Bcast(big),
            "all_gather": lambda: c.Allgather(small, big),
            "reduce_scatter": lambda: c.Reduce_scatter_block(big, small, self.op),
            "all_to_all": lambda: c.Alltoall(big, other),
            "barrier": c.Barrier,
            "send_recv": _ping_pong(c.rank, two, lambda to: c.Send(big, to), lambda who: c.Recv(other, who)),
        }
        return calls[kind]


def _ping_pong(rank: int, takes_part: bool, send: Callable[[int], Any], receive: Callable[[int], Any]) -> Call:
    """There and back, of neighbours; half of its time is a message's."""

    def call() -> None:
        if not takes_part:
            return
        if rank % 2 == 0:
            send(rank + 1)
            receive(rank + 1)
        else:
            receive(rank - 1)
            send(rank - 1)

    return call


def under_mpi() -> bool:
    return "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ


@contextlib.contextmanager
def all_peers(args: argparse.Namespace) -> Iterator[tuple[Any, dict[str, Any]]]:
    """ftcomm's communicator, and the peers that there are, by name."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["FTCOMM_TRANSPORT"], os.environ["FTCOMM_POLICY"] = args.transport, args.policy
    mpi = None
    if under_mpi():
        from mpi4py import MPI

        mpi = MPI.COMM_WORLD
        address = mpi.bcast(_free_address() if mpi.rank == 0 else None)
        os.environ.update(RANK=str(mpi.rank), WORLD_SIZE=str(mpi.size), MASTER_ADDR=address[0], MASTER_PORT=address[1])
    dist.init_process_group("ftcomm")
    from ftcomm.torch import communicator

    comm = communicator(dist.group.WORLD)
    peers: dict[str, Any] = {}
    for name in args.peers:
        if name == "ftcomm":
            peers[name] = Ftcomm(comm, args)
        elif name == "torch":
            peers[name] = Torch(dist.group.WORLD, args)
        elif name == "gloo":
            peers[name] = Torch(dist.new_group(backend="gloo"), args)
        elif mpi is not None:
            peers[name] = Mpi(mpi, args)
    try:
        yield comm, peers
    finally:
        dist.destroy_process_group()


def _free_address() -> tuple[str, str]:
    with socket.socket() as s:
        s.bind(("", 0))
        return socket.gethostbyname(socket.gethostname()), str(s.getsockname()[1])
