"""Random kills in jobs of several ftruns, under the policy replay: of one worker, of two, of a whole node, of all, at any moment.

Whatever dies, each rank ends with what it ends with in an undisturbed run, and each ftrun with 0; with checkpoints and without,
with replacements out of standbys or not, however messages between hosts are logged.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from launch.running import Kept, Start, start_nodes

from ftcomm.launch.folder import read_events

pytestmark = pytest.mark.table

WORK = """
import hashlib, os, time
import numpy as np
import ftcomm
os.write(1, b"here\\n")
comm = ftcomm.init()
saves = int(os.environ["SAVES"])
def path(tag): return f"{os.environ['STATE']}/{comm.rank}-{tag}.npy"
first, mine = comm.resume_from(lambda tag: np.load(path(tag))) if saves else (None, None)
if first is None:
    first, mine = 0, np.random.default_rng(comm.rank).standard_normal(5000)
arrived = np.empty_like(mine)
for step in range(first, int(os.environ["STEPS"])):
    ftcomm.ft_send(mine, (comm.rank + 1) % comm.size)
    ftcomm.ft_recv(arrived, (comm.rank - 1) % comm.size)
    mine += 0.5 * arrived
    if step % 3 == 2:
        ftcomm.ft_all_reduce(mine, "avg")
    if step % 5 == 4:
        comm.barrier()
    mine *= 0.7
    time.sleep(float(os.environ.get("PAUSE", "0")))
    if saves and step % saves == saves - 1:
        np.save(path(step + 1), mine)
        comm.commit_checkpoint(step + 1)
os.write(1, f"rank {comm.rank} {hashlib.sha256(mine.tobytes()).hexdigest()[:16]}\\n".encode())  # others write there, too
if os.environ["LEAVES"] == "1":
    comm.leave()
"""
LAYOUTS = {"2x2": (2, 2, ()), "3x1": (3, 1, ()), "2x2 inter-host": (2, 2, ("--log", "inter-host"))}
DELAYS = (0.0, 0.02, 0.06, 0.2, 0.4)  # seconds between kills, at most
_undisturbed: dict[tuple[str, int], list[str]] = {}


class How(NamedTuple):
    """What makes no difference to the result."""

    saves: int = 0  # steps between checkpoints; 0: none
    standbys: int = 0
    mode: str = "sync"


def ranks_of(ends: list[tuple[int, str, str]]) -> list[str]:
    """What the ranks have said, each thing once: one that is killed after it has said it says it again."""
    assert not any(code for code, _, _ in ends), ends
    return sorted({line for _, out, _ in ends for line in out.splitlines() if line.startswith("rank")})


class Job:
    """The ftruns of one run."""

    def __init__(self, start: Start, folder: Path, layout: str, steps: int, leaves: bool, how: How) -> None:
        self.nodes, self.each, more = LAYOUTS[layout]
        self.folder = folder
        folder.mkdir()
        flags = ("--policy", "replay", "--max-restarts", "50", "--standby", str(how.standbys), *more)
        env = {"STEPS": str(steps), "LEAVES": str(int(leaves)), "SAVES": str(how.saves), "STATE": str(folder)}
        env |= {"FTCOMM_TIMEOUT": "100", "FTCOMM_LOG_MODE": how.mode}
        self.ftruns = start_nodes(
            start, WORK, self.nodes, self.each, *flags, own=lambda n: ("--events", str(folder / str(n))), **env
        )
        for one in self.ftruns:
            one.read_lines(self.each)  # all run

    def living(self) -> dict[int, int]:
        """The workers' pids, by rank, as far as the ftruns have told."""
        pids: dict[int, int] = {}
        for node in range(self.nodes):
            path = self.folder / str(node) / f"ftrun-{node}.jsonl"
            for event in read_events(path) if path.exists() else ():
                if event["event"] == "spawn":
                    pids[event["rank"]] = event["pid"]
                elif event["event"] == "exit" and pids.get(event["rank"]) == event["pid"]:
                    del pids[event["rank"]]
        return pids

    def finish(self) -> list[str]:
        lines = ranks_of([one.finish() for one in self.ftruns])
        assert len(lines) == self.nodes * self.each, lines
        return lines


def strike(job: Job, rng: random.Random) -> None:
    living = job.living()
    ranks = sorted(living)
    if not ranks:
        return
    node = rng.randrange(job.nodes)
    victims = rng.choices(
        (
            [rng.choice(ranks)],
            rng.sample(ranks, min(2, len(ranks))),
            [rank for rank in ranks if rank // job.each == node],
            ranks,
        ),
        (60, 15, 15, 10),
    )[0]
    for rank in victims:
        try:
            os.kill(living[rank], signal.SIGKILL)
        except ProcessLookupError:  # it has ended since
            continue


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_kills(start: Start, tmp_path: Path, layout: str, seed: int) -> None:
    rng = random.Random(seed)
    steps = rng.choice((6, 20, 60))
    if (layout, steps) not in _undisturbed:
        _undisturbed[layout, steps] = Job(start, tmp_path / "undisturbed", layout, steps, True, How()).finish()
    how = How(rng.choice((0, 1, 2, 7)), rng.randrange(2), rng.choice(("sync", "async")))
    print(how)
    job = Job(start, tmp_path / "killed", layout, steps, rng.random() < 0.5, how)
    for _ in range(rng.randint(1, 4)):
        time.sleep(rng.choice(DELAYS) * rng.random())  # wherever the ranks are then: the result is the same
        strike(job, rng)
    assert job.finish() == _undisturbed[layout, steps]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_are_lost_and_spares_take_their_places(
    start: Start, kept: Kept, tmp_path: Path, nodes: int, seed: int
) -> None:
    """With their logs, any of them, one and then another one as soon as the rank is back."""
    rng = random.Random(seed)
    how = How(rng.choice((0, 5, 70)), 0, rng.choice(("sync", "async")))
    place = kept.flags("--nnodes", str(nodes), "--policy", "replay", "--max-restarts", "9")
    env = {"STEPS": "400", "LEAVES": str(seed % 2), "FTCOMM_TIMEOUT": "100", "FTCOMM_LOG_MODE": how.mode}
    env |= {"SAVES": str(how.saves), "STATE": str(tmp_path)}
    if ("lost", nodes) not in _undisturbed:
        known = [start(WORK, *place, **{**env, "SAVES": "0"}) for _ in range(nodes)]
        _undisturbed["lost", nodes] = ranks_of([one.finish() for one in known])
    spares = [start(WORK, *place, PAUSE="0.02", **env) for _ in range(nodes + 2)]
    there = []
    while len(there) < nodes:
        ready, _, _ = select.select([one.process.stdout for one in spares], [], [])
        there += [one for one in spares if one.process.stdout in ready]
        spares = [one for one in spares if one not in there]
    for one in there:
        one.read_lines(1)
    for one in spares:
        one.hear("this one waits")
    for _ in range(2):
        time.sleep(rng.choice(DELAYS) * rng.random())
        lost = there.pop(rng.randrange(nodes))
        lost.send(signal.SIGKILL)
        lost.finish()
        ready, _, _ = select.select([one.process.stdout for one in spares], [], [])
        spare = next(one for one in spares if one.process.stdout in ready)
        spare.hear("has caught up")
        spares.remove(spare)
        there.append(spare)
    assert ranks_of([one.finish() for one in there]) == _undisturbed["lost", nodes]
