"""The stages of replay_recovery.py: a pipeline of NumPy layers in 1F1B order, of which some stage kills itself once.

Started by ftrun or torchrun with what it has to do in PIPELINE, a JSON object. Each process writes into a file of its own what
happened when, in nanoseconds of CLOCK_MONOTONIC, a line of JSON for each event.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from _diary import Diary, process_number

import ftcomm

READY = time.monotonic_ns()
ACTIVATION, GRADIENT = 1, 2  # tags
RATE = np.float32(1e-3)

Array = np.ndarray[Any, np.dtype[np.float32]]


class Plan:
    """What the driver asks for."""

    system: str  # replay, rollback (survivors load the checkpoint where they are), restart (all processes anew), undisturbed
    micro_batches: int
    rows: int
    width: int
    layers: int
    checkpoint: int  # it is taken before this iteration
    kill: int  # the victims die in this iteration
    victims: list[int]
    iterations: int
    folder: str
    standbys: int  # that the workers wait for before they begin

    def __init__(self) -> None:
        self.__dict__.update(json.loads(os.environ["PIPELINE"]))


def wait_for_standbys(plan: Plan) -> None:
    """They must not be measured while they import."""
    while plan.standbys and process_number() == 0:
        told = (Path(os.environ["FTCOMM_EVENTS"]) / "ftrun-0.jsonl").read_text()
        if told.count('"standby-ready"') >= plan.standbys:
            return
        time.sleep(0.02)


def digest_of(weights: Iterable[Array]) -> str:
    return hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()[:16]


class Stage:
    """Layers of x -> tanh(x W), with what their backward pass needs."""

    def __init__(self, rank: int, plan: Plan) -> None:
        rng = np.random.default_rng(rank)
        scale = np.float32(plan.width**-0.5)
        self.weights = [
            scale * rng.standard_normal((plan.width, plan.width), dtype=np.float32) for _ in range(plan.layers)
        ]
        self.gradients = [np.zeros_like(w) for w in self.weights]
        self._kept: dict[int, list[Array]] = {}

    def forward(self, micro: int, x: Array) -> Array:
        kept = [x]
        for w in self.weights:
            kept.append(np.tanh(kept[-1] @ w))
        self._kept[micro] = kept
        return kept[-1]

    def backward(self, micro: int, gradient: Array) -> Array:
        kept = self._kept.pop(micro)
        for i in reversed(range(len(self.weights))):
            through = gradient * (1 - kept[i + 1] * kept[i + 1])
            self.gradients[i] += kept[i].T @ through
            gradient = through @ self.weights[i].T
        return gradient

    def update(self) -> None:
        self._kept.clear()
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            np.subtract(weight, RATE * gradient, out=weight)
            gradient[:] = 0

    def save(self, path: Path) -> None:
        np.save(path, np.stack(self.weights))

    def load(self, path: Path) -> None:
        for w, saved in zip(self.weights, np.load(path), strict=True):
            w[:] = saved
        self._kept.clear()
        for g in self.gradients:
            g[:] = 0


class Pipeline:
    """One process's part."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.rank, self.stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.process = process_number()
        self.folder = Path(self.plan.folder)
        self.diary = Diary(self.folder, self.rank, self.process)
        self.diary.note("ready", READY)
        self.stage = Stage(self.rank, self.plan)
        self.sent: list[ftcomm.Request] = []
        self.output: dict[int, Array] = {}  # of the last stage

    def join(self, job: int) -> ftcomm.Communicator:
        """Under replay there is one job for all; else each rollback needs a new one, so that no message is left over."""
        replay = self.plan.system == "replay"
        options = ftcomm.Options(policy="replay" if replay else "raise")
        name, number = ("replay", self.process) if replay else (f"round-{job}", 0)
        comm = ftcomm.init(self.rank, self.stages, f"file://{self.folder}/store", options, job=name, incarnation=number)
        self.diary.note("joined")
        if replay:
            comm.job.add_listener(lambda e: self.diary.note("caught-up") if e["event"] == "caught-up" else None)
        return comm

    def run(self) -> None:
        wait_for_standbys(self.plan)
        if self.plan.system == "replay":
            comm = self.join(0)
            at, _ = comm.resume_from(lambda tag: self.stage.load(self.saved()))
            self.train(comm, int(at or 0))
        else:
            job, at = self.process, self.plan.checkpoint if self.process else 0
            if self.process:
                self.stage.load(self.saved())
            comm = self.join(job)
            try:
                self.train(comm, at)
            except (ftcomm.PeerFailure, ftcomm.Revoked):
                if self.plan.system != "rollback":
                    raise
                comm.revoke()
                comm.job.close()
                self.sent.clear()
                self.output.clear()
                self.stage.load(self.saved())
                comm = self.join(job + 1)
                self.train(comm, self.plan.checkpoint)
        self.diary.note("digest", value=digest_of(self.stage.weights))
        comm.leave()

    def saved(self) -> Path:
        return self.folder / f"checkpoint-{self.rank}.npy"

    def train(self, comm: ftcomm.Communicator, at: int) -> None:
        for iteration in range(at, self.plan.iterations):
            if iteration == self.plan.checkpoint and iteration != at:
                self.stage.save(self.saved())
                if self.plan.system == "replay":
                    comm.commit_checkpoint(iteration)
                else:
                    comm.barrier()
            self.iterate(comm, iteration)
            self.diary.note("iteration", number=iteration)

    def iterate(self, comm: ftcomm.Communicator, iteration: int) -> None:
        """1F1B: forwards until the pipeline is full, then one backward after each forward, then the rest."""
        count, ahead = self.plan.micro_batches, min(self.stages - 1 - self.rank, self.plan.micro_batches)
        for micro in range(ahead):
            self.forward(comm, iteration, micro)
        for micro in range(count):
            if ahead + micro < count:
                self.forward(comm, iteration, ahead + micro)
            if micro == count // 2:
                self.die_if_told(iteration)
            self.backward(comm, iteration, micro)
        self.stage.update()
        for request in self.sent:
            request.wait()
        self.sent.clear()

    def shape(self) -> tuple[int, int]:
        return self.plan.rows, self.plan.width

    def drawn(self, iteration: int, micro: int) -> Array:
        rng = np.random.default_rng((iteration, micro))
        return rng.standard_normal(self.shape(), dtype=np.float32)

    def forward(self, comm: ftcomm.Communicator, iteration: int, micro: int) -> None:
        if self.rank == 0:
            x = self.drawn(iteration, micro)
        else:
            x = np.empty(self.shape(), np.float32)
            comm.recv(x, self.rank - 1, tag=ACTIVATION)
        y = self.stage.forward(micro, x)
        if self.rank < self.stages - 1:
            self.sent.append(comm.isend(y, self.rank + 1, tag=ACTIVATION))
        else:
            self.output[micro] = y

    def backward(self, comm: ftcomm.Communicator, iteration: int, micro: int) -> None:
        if self.rank == self.stages - 1:
            gradient = self.output.pop(micro) - np.sin(self.drawn(iteration, micro))
        else:
            gradient = np.empty(self.shape(), np.float32)
            comm.recv(gradient, self.rank + 1, tag=GRADIENT)
        gradient = self.stage.backward(micro, gradient)
        if self.rank > 0:
            self.sent.append(comm.isend(gradient, self.rank - 1, tag=GRADIENT))

    def die_if_told(self, iteration: int) -> None:
        if self.process == 0 and iteration == self.plan.kill and self.rank in self.plan.victims:
            self.diary.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Pipeline().run()
