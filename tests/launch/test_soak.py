"""make soak: random SIGKILLs in one DDP run of 4 ranks with replacements. ``FTCOMM_SOAK_KILLS`` says how many.

Figures go to build/soak.json.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from launch.running import Ftrun, clean_environment

pytest.importorskip("ftcomm.torch")

RANKS = 4
KILLS = int(os.environ.get("FTCOMM_SOAK_KILLS", "200"))
PATIENCE = 180.0  # without a word from any worker: only a hang takes that long
WORKER = Path(__file__).with_name("soak_worker.py")
REPORT = Path(__file__).parents[2] / "build" / "soak.json"


class Run:
    """ftrun over the worker script, and what its workers have said."""

    def __init__(self, folder: Path, stop: str | None) -> None:
        folder.mkdir()
        self.stop, self.log = folder / "stop", folder / "ftrun.log"
        if stop is not None:
            self.stop.write_text(stop)
        flags = [
            "--nproc-per-node",
            str(RANKS),
            "--policy",
            "lossy",
            "--max-restarts",
            "1000000",
            "--events",
            str(folder),
        ]
        with open(self.log, "w") as log:
            self.process = Ftrun([*flags, str(WORKER)], clean_environment(SOAK_STOP=str(self.stop)), log).process
        self.heard = time.monotonic()  # when a worker last said something
        self.lines: queue.Queue[list[str] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.process_of: dict[int, int] = {}  # rank -> pid
        self.training: set[int] = set()
        self.joinings: dict[int, dict[int, str]] = {}  # step -> rank -> digest
        self.ended: dict[int, tuple[int, str, float]] = {}  # rank -> step, digest, accuracy
        self.over = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.split())
        self.lines.put(None)

    def listen(self, seconds: float) -> None:
        """Takes in what the workers say for that long, or until ftrun has ended."""
        until = time.monotonic() + seconds
        while not self.over and time.monotonic() < until:
            try:
                self._hear(self.lines.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                silent = time.monotonic() - self.heard
                assert silent < PATIENCE, f"no worker has said anything for {silent:.0f} s:\n{self.tail()}"

    def _hear(self, line: list[str] | None) -> None:
        self.heard = time.monotonic()
        if line is None:
            self.over = True
            return
        word, rank = line[0], int(line[1])
        if word == "started":
            self.process_of[rank] = int(line[2])
            self.training.discard(rank)
        elif word == "in":
            self.training.add(rank)
        elif word == "joined":
            self.joinings.setdefault(int(line[2]), {})[rank] = line[3]
        elif word == "done":
            self.ended[rank] = (int(line[3]), line[4], float(line[5]))

    def until_all_train(self) -> None:
        while len(self.training) < RANKS:
            self.listen(0.5)
            assert not self.over, self.tail()

    def kill(self, rank: int) -> str:
        """Returns what it was doing."""
        phase = "training" if rank in self.training else "starting or joining"
        self.training.discard(rank)
        os.kill(self.process_of.pop(rank), signal.SIGKILL)  # its number is free only once ftrun has reaped it
        return phase

    def tail(self) -> str:
        return self.log.read_text()[-4000:]

    def finish(self) -> None:
        while not self.over:
            self.listen(1.0)
        assert self.process.wait(PATIENCE) == 0, self.tail()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_random_kills(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    begin = time.monotonic()
    run = Run(tmp_path / "kills", None)
    killed = dict.fromkeys(range(RANKS), 0)
    killed_while: Counter[str] = Counter()
    try:
        run.until_all_train()
        while sum(killed.values()) < KILLS:
            # Every other death waits for a whole team. A worker takes longer to start than a second, so without this nearly
            # all would hit replacements that have not come in yet; with it alone none would.
            if dice.random() < 0.5:
                run.until_all_train()
            victims: list[int] = []
            while not victims:
                run.listen(dice.expovariate(1.0))
                assert not run.over, run.tail()
                # Starting, joining or training, rank 0 too; but two that have the state of the training stay.
                victims = [rank for rank in run.process_of if len(run.training - {rank}) >= 2]
            victim = dice.choice(victims)
            killed_while[run.kill(victim)] += 1
            killed[victim] += 1
        seconds = time.monotonic() - begin
        run.until_all_train()
        run.stop.touch()
        run.finish()
    finally:
        run.close()
    assert len(run.ended) == RANKS, run.tail()
    assert len({end[:2] for end in run.ended.values()}) == 1, run.ended
    for step, digests in run.joinings.items():
        assert len(set(digests.values())) == 1, f"replicas differ at step {step}: {digests}"
    steps, _, accuracy = run.ended[0]

    quiet = Run(tmp_path / "quiet", str(steps))
    try:
        quiet.finish()
    finally:
        quiet.close()
    undisturbed = quiet.ended[0][2]

    story = run.log.read_text()
    REPORT.parent.mkdir(exist_ok=True)
    figures = {
        "seed": seed,
        "kills": KILLS,
        "kills_of_rank": killed,
        "killed_while": killed_while,
        "seconds": round(seconds, 1),
        "steps": steps,
        "replacements_that_came_in": story.count("rejoined at step"),
        "joinings": len(run.joinings),
        "ranks_compared_at_a_joining": statistics.mean(len(d) for d in run.joinings.values()) if run.joinings else 0,
        "repaired": story.count("repaired: contributors"),
        "accuracy": accuracy,
        "accuracy_of_the_quiet_run": undisturbed,
    }
    REPORT.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    assert abs(accuracy - undisturbed) <= 0.01
