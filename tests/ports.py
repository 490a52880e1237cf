"""A port that nobody listens at."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """Not one of those that the kernel gives to connections: by the time somebody listens there, one might have it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # By the system's generator: forked tests would draw the same from Python's.
    ports = random.SystemRandom().sample(range(10000, first), 100) if first > 20000 else [0]
    for port in ports:
        try:
            with socket.create_server(("127.0.0.1", port)) as sock:
                return int(sock.getsockname()[1])
        except OSError:
            continue
    raise AssertionError(f"none of {ports} is free")
