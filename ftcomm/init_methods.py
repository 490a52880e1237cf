"""Init methods: from ``"auto"``, ``"env://"``, ``"tcp://host:port"``, ``"file://path"`` or ``"mpi://"`` to a store and a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ftcomm.errors import ConfigError, SystemFailure
from ftcomm.options import Options
from ftcomm.rendezvous import check_world, job_of_this_start
from ftcomm.stores import Store
from ftcomm.torchrun import counts_starts

__all__ = ["Meeting", "find", "under_mpi"]

_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Meeting:
    """Where this process meets the others, and as which rank; the job's name and secret where the method chose them.

    ``watch(job)`` is a context in which the start runs, where the method can see deaths that the store can not. It tells the
    others through the method's store; through another one where that is given: ``watch(job, connect)``.
    """

    store: Any
    rank: int
    world_size: int
    job: str | None = None
    secret: str | None = None
    watch: Callable[..., AbstractContextManager[None]] | None = None


def find(method: str, rank: int | None, world_size: int | None, options: Options, timeout: float) -> Meeting:
    """Makes the store of an init method; rank and world size that are None come from the environment."""
    environment = os.environ
    if method == "auto":
        method = _automatic(environment)
    if method == "mpi://":
        from ftcomm.mpi import meet

        return meet(rank, world_size, options, timeout)
    rank, world_size = _number("rank", rank, environment), _number("world_size", world_size, environment)
    check_world(rank, world_size)  # before a store is made, or waited for
    parts = urlsplit(method)
    if method == "env://":
        store = _environment_store(rank, world_size, options, timeout, environment)
        job = job_of_this_start(store, rank, world_size, timeout) if counts_starts() else None
        return Meeting(store, rank, world_size, job)
    if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
        return Meeting(_tcp(parts.hostname, parts.port, rank, options, timeout), rank, world_size)
    if parts.scheme == "file" and parts.path and not parts.netloc:
        from ftcomm.stores.file import FileStore

        return Meeting(FileStore(parts.path), rank, world_size)
    raise ConfigError(
        f"init_method={method!r} is not known. Use auto, env://, tcp://HOST:PORT, file:///ABSOLUTE/PATH or mpi://, "
        "or give a torch Store as store=."
    )


def _automatic(environment: Mapping[str, str]) -> str:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "env://"
    if under_mpi(environment):
        return "mpi://"
    raise ConfigError(
        "No launcher is seen: neither RANK and WORLD_SIZE nor an MPI launcher's variables are set. Start the program with "
        "`ftrun --nproc-per-node 4 prog.py` or `mpirun --with-ft ulfm -n 4 python prog.py`, or call "
        "ftcomm.init(rank=, world_size=, init_method='tcp://127.0.0.1:29500')."
    )


def under_mpi(environment: Mapping[str, str]) -> bool:
    """Whether an MPI launcher has started this process."""
    return any(name in environment for name in _MPI_VARIABLES)


def _number(name: str, given: int | None, environment: Mapping[str, str]) -> int:
    if given is not None:
        return given
    text = environment.get(name.upper(), "")
    if not text.isdigit():
        what = f"is {text!r}" if text else "is not set"
        raise ConfigError(f"The environment variable {name.upper()} {what}; it must be a number (or give {name}=).")
    return int(text)


def _environment_store(
    rank: int, world_size: int, options: Options, timeout: float, environment: Mapping[str, str]
) -> Any:
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _agent_store(world_size, timeout, environment)
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if world_size == 1 and not (host and port):
        return None
    if not host or not port.isdigit():
        raise ConfigError(
            f"env:// needs MASTER_ADDR (now {host!r}) and MASTER_PORT (now {port!r}): the address of rank 0 and a free port "
            "there, the same on every rank."
        )
    return _tcp(host, int(port), rank, options, timeout)


def _agent_store(world_size: int, timeout: float, environment: Mapping[str, str]) -> Any:
    """ftrun's and torchrun's agent hosts a torch TCPStore, which outlives every worker."""
    from datetime import timedelta

    try:
        from torch.distributed import PrefixStore, TCPStore
    except ImportError:
        raise ConfigError(
            "TORCHELASTIC_USE_AGENT_STORE is set, but torch is not installed here. Install torch, or unset it for ftcomm's "
            "own store in rank 0."
        ) from None
    try:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ConfigError("The launcher's MASTER_ADDR and MASTER_PORT are missing or wrong.") from None
    store = TCPStore(host, port, world_size, False, timedelta(seconds=timeout), wait_for_workers=False)
    return PrefixStore("ftcomm", store)


def _tcp(host: str, port: int, rank: int, options: Options, timeout: float) -> Store:
    """Rank 0's first process in a generation hosts the store; it is lost with that process."""
    from ftcomm.job import generation_from_environment
    from ftcomm.rendezvous import incarnation_from_environment
    from ftcomm.stores.tcp import TcpStore
    from ftcomm.stores.tcp_server import TcpStoreServer

    secret = (options.secret or "").encode()
    founds = incarnation_from_environment() == 0 or generation_from_environment()[0] > 0
    server = TcpStoreServer(host, port, secret) if rank == 0 and founds else None
    if server is not None:
        port = server.address[1]
    try:
        return TcpStore(host, port, secret, timeout, server, came_up=rank == 0)
    except BaseException as error:
        if server is not None:
            server.close(0)
        elif rank == 0 and isinstance(error, SystemFailure):
            raise ConfigError(
                f"This process replaces rank 0, and the store that rank 0 hosted has ended with it: {error.message} Start the "
                "job with ftrun, whose store outlives its workers, or give it a store that lives elsewhere (file:///PATH, "
                "store=). To start all ranks again out of their logs (policy replay) give all of them FTCOMM_GENERATION, too."
            ) from None
        raise
