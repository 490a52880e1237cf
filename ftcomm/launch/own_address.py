"""Under which address this node's workers, and the other nodes, find what it serves."""

from __future__ import annotations

import argparse
import socket

from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

__all__ = ["own_address"]

_ANY_PORT = 9  # nothing is sent to it


def own_address(args: argparse.Namespace) -> str | None:
    """``--local-addr``, or what has to stand in for it; None where torch's own choice, the host's name, will do.

    Nothing may know that name: a container or a cloud image without a line for it in /etc/hosts. torch's store would then wait
    for itself in a connect that no signal interrupts.
    """
    given: str | None = args.local_addr
    if given or _resolves(socket.getfqdn()):
        return given
    if torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1:
        return "localhost"
    endpoint = args.rdzv_endpoint
    return _address_towards(parse_rendezvous_endpoint(endpoint, _ANY_PORT)[0] if endpoint else args.master_addr)


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _address_towards(host: str) -> str | None:
    """This node's, on the interface by which it reaches the host. Nothing is sent."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as way:
                way.connect(address)
                return str(way.getsockname()[0])
    except OSError:
        pass
    return None  # the rendezvous says that it can't be reached
