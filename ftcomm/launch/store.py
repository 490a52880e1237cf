"""Where a store lives, and whether it still does."""

from __future__ import annotations

import os
import socket

from torch.distributed import Store


def somebody_listens(address: str, port: int) -> bool | None:
    """None: of a host that does not answer nothing is known. (Torch's own attempts print a page each.)"""
    try:
        with socket.create_connection((address, port), 1.0):
            return True
    except ConnectionRefusedError:
        return False  # any more: whoever did has ended
    except OSError:
        return None


def is_served(store: Store) -> bool | None:
    """The same of a store's other end; False where it has none that can be asked."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "host") or not hasattr(store, "port"):
        return False
    return somebody_listens(store.host, store.port)


def own_connection(store: Store) -> Store:
    """One that nobody else's waits keep busy, where there is such a thing."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


def serves_store() -> bool:
    """Whether a store lives in this process: the rendezvous', or that of the job. Nothing else in ftrun listens."""
    return any(_listens(int(name)) for name in os.listdir("/proc/self/fd"))


def _listens(number: int) -> bool:
    try:
        fd = os.dup(number)
    except OSError:
        return False
    try:
        one = socket.socket(fileno=fd)
    except OSError:  # no socket
        os.close(fd)
        return False
    with one:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
