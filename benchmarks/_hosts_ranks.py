"""A rank of between_hosts.py: measures all systems in turn, and iperf3 on the same line between the sizes.

python _hosts_ranks.py ARGUMENTS.json RESULT.json        started by between_hosts.py on either host
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _hosts_network import ADDRESSES, DEVICE
from suite.machine import described
from suite.measure import itemsize, measured, slowest
from suite.operations import buffers, elements
from suite.output import json_rows
from suite.peers import all_peers

KIND = "all_reduce"
COUNTED = 4  # all-reduces whose bytes on the wire are counted
OMITTED = 1  # seconds that iperf3's connections have to find their speed


def main() -> None:
    args = argparse.Namespace(**json.loads(Path(sys.argv[1]).read_text()))
    os.environ.update(FTCOMM_HOST=socket.gethostname(), FTCOMM_INTERFACE=DEVICE, GLOO_SOCKET_IFNAME=DEVICE)
    with all_peers(args) as (comm, peers):
        machine = described(args, comm.size)
        trips = [round_trip() for _ in range(5)] if comm.rank == 0 else []
        iperf, cells, wires = [_iperf(comm, args)], [], []
        for cell in measured(KIND, comm, peers, args):
            cells.append(cell)
            wires.append({name: _on_the_wire(comm, peers[name], cell.nbytes, args) for name in cell.times})
            iperf.append(_iperf(comm, args))
        if comm.rank == 0:
            rows = [row | {"wire": wire} for row, wire in zip(json_rows(cells), wires, strict=True)]
            found = {
                "machine": machine,
                "round_trip": statistics.median(trips),
                "tcp": tcp_settings(),
                "iperf": [one for one in iperf if one is not None],
                "cells": rows,
            }
            Path(sys.argv[2]).write_text(json.dumps(found))


def round_trip() -> float:
    """Seconds until the other host's kernel has said that nobody listens there."""
    start = time.perf_counter()
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((ADDRESSES[1], 9), 10):
        pass
    return time.perf_counter() - start


def tcp_settings() -> dict[str, str]:
    """What bounds a connection's speed on a long line, for all systems alike."""
    names = ("tcp_congestion_control", "tcp_rmem", "tcp_wmem", "tcp_slow_start_after_idle")
    return {name: " ".join(Path(f"/proc/sys/net/ipv4/{name}").read_text().split()) for name in names}


def _on_the_wire(comm: Any, peer: Any, nbytes: int, args: argparse.Namespace) -> float:
    """Bytes that leave a host for one all-reduce, with TCP's headers: of the host that more leave."""
    count = elements(KIND, nbytes, itemsize(args.dtype), comm.size)
    call = peer.call(KIND, buffers(KIND, count, comm.size, args.dtype))
    comm.barrier()
    before = _sent()
    for _ in range(COUNTED):
        call()
    comm.barrier()
    return slowest([(_sent() - before) / COUNTED], comm)[0]


def _sent() -> int:
    for row in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = row.partition(":")
        if name.strip() == DEVICE:
            return int(figures.split()[8])
    raise RuntimeError(f"no device {DEVICE}")


def _iperf(comm: Any, args: argparse.Namespace) -> dict[str, float] | None:
    """Collective: while it runs the ranks sleep. The server is one for this run only, so that none is left."""
    if shutil.which("iperf3") is None:
        return None
    server = None
    try:
        if comm.rank == comm.size // 2:  # the first of the second host
            server = subprocess.Popen(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            for row in server.stdout:
                if "listening" in row:
                    break
        comm.barrier()
        found = _client(args.iperf_seconds) if comm.rank == 0 else None
        comm.barrier()
        return found
    finally:
        if server is not None:
            server.kill()
            server.communicate()


def _client(seconds: int) -> dict[str, float]:
    command = ["iperf3", "-c", ADDRESSES[1], "--bidir", "-t", str(seconds), "-O", str(OMITTED), "-J"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found = json.loads(done.stdout or "{}")
    if done.returncode != 0 or "error" in found:
        raise RuntimeError(f"iperf3: {found.get('error') or done.stderr}")
    end = found["end"]
    ways = [end[name]["bits_per_second"] for name in ("sum_received", "sum_received_bidir_reverse")]
    used = end["cpu_utilization_percent"]
    return {
        "bits_per_second": sum(ways) / 2,
        "there": ways[0],
        "back": ways[1],
        "processors": (used["host_total"] + used["remote_total"]) / 100,
        "retransmits": end["sum_sent"]["retransmits"] + end["sum_sent_bidir_reverse"]["retransmits"],
    }


if __name__ == "__main__":
    main()
