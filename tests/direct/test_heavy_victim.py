"""The victim is as large as in real training: it holds 1 GiB and has two forked children, as DataLoader workers are.

The children have copies of everything and outlive it; the kernel takes long to free the memory. Neither may delay the news of the
death, nor stand in for the process that is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_table as table
import numpy as np
import pytest
from harness import DEADLINE, Context, Group, Ranks
from kill_table import Comm

import ftcomm

GIB = 1 << 30
# transport, ranks on a host, and what the death may be known by; never silence. A fellow rank on the victim's host sees the death
# and records it for all. Otherwise the kernel closes the sockets, when it has freed the memory.
SEEN = {"robust-futex", "pidfd"}
ON = {
    "shm": ("shm", 4, SEEN),
    "tcp": ("tcp", 4, SEEN),
    "two hosts": ("auto", 2, {*SEEN, "agent", "reset"}),
    "two hosts, tcp inside": ("tcp", 2, {*SEEN, "agent", "reset"}),
    "four hosts": ("tcp", 1, {"reset"}),
}


class Children:
    """Forked by the victim; each sleeps until the test lets it go."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.pids: list[int] = []

    def fork_two(self, context: Context) -> Any:
        """In the victim; returns what it must go on holding."""
        held = np.ones(GIB // 8)
        os.close(self._write)
        pids = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                os.read(self._read, 1)
                os._exit(0)
            pids.append(pid)
        context.mark("children", pids)
        return held

    def not_the_victim(self) -> None:
        os.close(self._write)

    def check_and_end(self, group: Group, victim: int) -> None:
        """They live on, hold nothing of the job, and end when told."""
        self.pids = group.wait_for(victim, "children")
        results = [os.pidfd_open(pid) for pid in self.pids]
        for pid in self.pids:
            assert not mapped(pid), mapped(pid)
            assert not sockets(pid), sockets(pid)
        os.close(self._write)
        for fd in results:
            assert select.select([fd], [], [], DEADLINE)[0]
            os.close(fd)

    def close(self) -> None:
        for fd in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(fd)


def mapped(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:ftcomm" in line]


def sockets(pid: int) -> list[str]:
    """Descriptors that can only be the library's: sockets, but for the two of the harness, and segments."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    return [link for link in links if "ftcomm" in link or "eventpoll" in link]


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.close()


def evidence_in(folder: Path, slot: int) -> dict[str, str]:
    """How each rank learned of the death, from its events."""
    seen = {}
    for path in folder.glob("events-*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "removed" and event["slot"] == slot:
                seen[path.name] = event["evidence"]
    return seen


def run_heavy(
    ranks: Ranks, children: Children, folder: Path, policy: str, transport: str, victim: int, point: str
) -> None:
    wire, on_a_host, known_by = ON[transport]

    def start(group: Group, context: Context) -> Any:
        host = f"host-{context.rank // on_a_host}" if on_a_host < 4 else None
        options = dataclasses.replace(group.options, host=host)
        comm = ftcomm.init(context.rank, 4, store=group.store(), job=group.job, options=options, timeout=30)
        value = run(comm, context)
        comm.leave()
        return value

    def run(comm: Comm, context: Context) -> Any:
        if comm.rank == victim:
            held = children.fork_two(context)
            assert held[-1] == 1
        else:
            children.not_the_victim()
        comm.barrier()
        if comm.rank == victim and not point:
            context.die()
        return table.survive(comm, 3) if policy == "raise" else table.lossy_rounds(comm, 0, 4)

    faults = f"rank={victim},at={point},do=kill" if point else ""
    options = {"policy": policy, "transport": wire, "heartbeat": 5.0, "events": str(folder)}
    group = ranks.start(4, start, direct=False, faults=faults, **options)
    results = group.results()
    children.check_and_end(group, victim)
    dead = [r.rank for r in results if r.status == -signal.SIGKILL]
    assert dead == [victim], table.text_of(results)
    alive = [r for r in results if r.rank != victim]
    assert all(r.ok for r in alive), table.text_of(results)
    assert len({str(r.value) for r in alive}) == 1, table.text_of(results)
    evidence = evidence_in(folder, victim)
    assert len(evidence) == 3, evidence
    assert set(evidence.values()) <= known_by, evidence


@pytest.mark.parametrize("transport", list(ON))
@pytest.mark.sample(3)
def test_heavy_victim(ranks: Ranks, children: Children, tmp_path: Path, transport: str) -> None:
    run_heavy(ranks, children, tmp_path / "events", "lossy", transport, 2, "ring.rs.hop:3")


@pytest.mark.table
@pytest.mark.parametrize("transport", list(ON))
@pytest.mark.parametrize("policy", ["raise", "lossy"])
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("point", ["", "ring.rs.hop:5", "fence.round:3", "flat.send:4", "ring.ag.hop"])
def test_heavy_victim_at_points(
    ranks: Ranks, children: Children, tmp_path: Path, transport: str, policy: str, victim: int, point: str
) -> None:
    if point == "flat.send:4" and transport == "shm":
        point = "flat.post"  # of the same operation: only the first one's inputs are sent there
    run_heavy(ranks, children, tmp_path / "events", policy, transport, victim, point)
