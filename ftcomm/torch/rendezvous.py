"""torch's rendezvous under an MPI launcher: ``init_process_group("ftcomm")`` with no address in the environment.

MPI spreads the address of a torch TCPStore in rank 0, as :mod:`ftcomm.mpi` does it for ``ftcomm.init()``. Loads nothing of MPI or
of ftcomm's native part before it is asked to: torch registers this when it is imported itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ftcomm.torchrun import counts_starts

__all__ = ["register", "starting", "take", "take_agents"]

# Seconds; the store is up already. torch's client takes a refused connection for one that is not yet, and tries again for all of
# its timeout, which init_process_group() makes half an hour: too long for a rank 0 that has died.
_CONNECT_WITHIN = 10.0
_LINGER = 5.0  # seconds that rank 0, which hosts the store, stays for the others when the start has failed
_met: list[Any] = []  # the Meeting of a rendezvous whose job has not begun to start
_agents: list[Any] = []  # torchrun's store, of such a rendezvous


def register() -> None:
    """The scheme ``mpi://``, which ``env://``, torch's default, gives way to where a launcher of MPI has set no ``RANK``."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler("mpi", _meet)
    try:
        from torch.distributed.rendezvous import _rendezvous_handlers as known  # a handler can't be replaced in public

        known["env"] = _giving_way(known["env"])
    except (ImportError, KeyError, TypeError):
        return  # another torch: init_method="mpi://" has to be said


def _giving_way(torchs: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def environment(url: str, **kwargs: Any) -> Iterator[Any]:
        from ftcomm.init_methods import under_mpi

        given = "RANK" in os.environ or "rank" in _query(url)
        if not given and under_mpi(os.environ):
            return _meet(url, **kwargs)
        return _noting_agents(torchs(url, **kwargs)) if counts_starts() else torchs(url, **kwargs)

    return environment


def _noting_agents(found: Iterator[Any]) -> Iterator[Any]:
    """The store of a rendezvous. Some versions of torch put a prefix before it, with the number of restarts of this node."""
    for store, rank, world_size in found:
        _agents[:] = [getattr(store, "underlying_store", store)]
        yield store, rank, world_size


def take_agents() -> Any:
    """torchrun's store, if that is what the rendezvous that led here has given; once."""
    return _agents.pop() if _agents else None


def _meet(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Any, int, int]]:
    from ftcomm.mpi import meet
    from ftcomm.options import Options

    said = _query(url)
    meeting = meet(said.get("rank"), said.get("world_size"), Options(), timeout.total_seconds(), _TorchHosting())
    _met[:] = [meeting]
    yield meeting.store, meeting.rank, meeting.world_size
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")  # as torch's own handlers


def _query(url: str) -> dict[str, int]:
    return {name: int(values[-1]) for name, values in parse_qs(urlsplit(url).query).items() if values[-1].isdigit()}


class _TorchHosting:
    """A torch TCPStore. It has no secret of its own: as with ``env://``, who reaches its port can read and write it."""

    def host(self, name: str, key: str, timeout: float, ranks: int) -> tuple[Any, tuple[str, int], None]:
        from torch.distributed import TCPStore

        from ftcomm.errors import SystemFailure
        from ftcomm.stores.tcp_server import to_listen_at

        family, kind, protocol, _, address = to_listen_at(name, 0)
        listening = socket.socket(family, kind, protocol)
        try:
            listening.bind(address)  # by itself torch binds all interfaces
            listening.listen(1024)
            port = listening.getsockname()[1]
        except OSError as error:
            listening.close()
            raise SystemFailure(f"No store can listen at {name}: {error.strerror}.") from None
        try:
            store = TCPStore(
                name,
                port,
                is_master=True,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        except RuntimeError as error:  # as an error of ftcomm's it is told to all ranks
            raise SystemFailure(f"No store can be had at {name}: {error}") from None
        return store, (name, port), None

    def visit(self, address: tuple[str, int], key: str, timeout: float) -> Any:
        from torch.distributed import DistNetworkError, TCPStore

        bound = min(timeout, _CONNECT_WITHIN)
        try:
            socket.create_connection(address, bound).close()
            return TCPStore(*address, is_master=False, timeout=timedelta(seconds=bound), wait_for_workers=False)
        except (OSError, DistNetworkError) as error:
            raise _lost(error) from None


def take() -> Any:
    """The Meeting of the rendezvous that led here, once; None: it was another one."""
    return _met.pop() if _met else None


@contextlib.contextmanager
def starting(meeting: Any, store: Any, job: str) -> Iterator[None]:
    """Around the start: rank 0 watches for deaths that MPI knows of, and the others name rank 0 if its store is gone."""
    from torch.distributed import DistNetworkError

    from ftcomm.stores.torch_store import TorchStore

    watch: AbstractContextManager[None] = contextlib.nullcontext()
    if meeting.watch is not None:
        watch = meeting.watch(job, lambda: TorchStore(store))
    usual = store.timeout
    try:
        store.set_timeout(min(usual, timedelta(seconds=_CONNECT_WITHIN)))  # TorchStore() makes another connection
        with watch, _heard_by_all(meeting, store, job):
            yield
    except DistNetworkError as error:
        raise _lost(error) from None
    finally:
        store.set_timeout(usual)


@contextlib.contextmanager
def _heard_by_all(meeting: Any, store: Any, job: str) -> Iterator[None]:
    """Around a start: if it fails, rank 0 stays until the others that live have read why, since the store ends with it."""
    from ftcomm.errors import Error

    try:
        yield
    except Error as error:
        keys = {rank: f"{job}/rdv/heard/{rank}" for rank in range(meeting.world_size) if rank not in error.ranks}
        with contextlib.suppress(RuntimeError):  # they take longer, or the store is what has failed
            if meeting.rank in keys:
                store.set(keys[meeting.rank], "")
            if meeting.rank == 0:
                store.wait(list(keys.values()), timedelta(seconds=_LINGER))
        raise


def _lost(error: BaseException) -> Exception:
    from ftcomm.errors import SystemFailure

    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SystemFailure(f"The job's store can't be reached; rank 0, its host, may have ended: {first}")
