"""The same as _pipeline_ranks.py with torch.distributed.pipelining's Schedule1F1B on the backend ftcomm.

In the first step of a schedule the stages tell each other what they send. A replacement has to do that again, so each process
makes one step before it resumes from a checkpoint; under replay it does so out of the log.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ftcomm.torch

# isort: split
# Last, as its calls end what a standby imports beforehand.
from _diary import Diary, process_number
from _pipeline_ranks import Plan, digest_of, wait_for_standbys

READY = time.monotonic_ns()


class Pipeline:
    """One process's part."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.rank, self.stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.process = process_number()
        self.folder = Path(self.plan.folder)
        self.saved = self.folder / f"checkpoint-{self.rank}.pt"
        self.diary = Diary(self.folder, self.rank, self.process)
        self.diary.note("ready", READY)
        torch.manual_seed(self.rank)
        width = self.plan.width
        self.layers = nn.Sequential(*[m for _ in range(self.plan.layers) for m in (nn.Linear(width, width), nn.Tanh())])
        self.layers.register_forward_hook(self.count_and_die)
        self.iteration, self.forwards = -1, 0
        self.optimizer = torch.optim.SGD(self.layers.parameters(), 1e-2)

    def join(self, job: int) -> None:
        """Under replay there is one job for all; else each rollback begins a new one, so that no message is left over."""
        method = "env://"
        if self.plan.system != "replay":
            # A second job in one process gets the name of the first and ".1".
            os.environ.update(FTCOMM_JOB=f"round.{job}" if self.process else "round", FTCOMM_INCARNATION="0")
            method = f"file://{self.folder}/store-{job}"
        dist.init_process_group("ftcomm", init_method=method, rank=self.rank, world_size=self.stages)
        self.diary.note("joined")
        stage = PipelineStage(self.layers, self.rank, self.stages, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, self.plan.micro_batches, loss_fn=nn.functional.mse_loss)
        self.step(0)
        self.optimizer.zero_grad()

    def run(self) -> None:
        wait_for_standbys(self.plan)
        job = 0 if self.plan.system == "replay" else self.process
        self.join(job)
        if self.plan.system == "replay":
            comm = ftcomm.torch.communicator()
            comm.job.add_listener(lambda e: self.diary.note("caught-up") if e["event"] == "caught-up" else None)
            at, _ = comm.resume_from(lambda _: self.load())
            self.train(int(at or 0))
        elif self.process:
            self.load()
            self.train(self.plan.checkpoint)
        else:
            try:
                self.train(0)
            except RuntimeError:
                if self.plan.system != "rollback":
                    raise
                dist.destroy_process_group()
                self.join(job + 1)
                self.load()
                self.train(self.plan.checkpoint)
        self.diary.note("digest", value=digest_of(p.detach().numpy() for p in self.layers.parameters()))
        dist.destroy_process_group()

    def load(self) -> None:
        self.layers.load_state_dict(torch.load(self.saved))

    def train(self, at: int) -> None:
        for iteration in range(at, self.plan.iterations):
            self.iteration = iteration
            if iteration == self.plan.checkpoint != at:
                torch.save(self.layers.state_dict(), self.saved)
                if self.plan.system == "replay":
                    ftcomm.torch.communicator().commit_checkpoint(iteration)
                else:
                    dist.barrier()
            self.forwards = 0
            self.optimizer.zero_grad()
            self.step(iteration)
            self.optimizer.step()
            self.diary.note("iteration", number=iteration)

    def step(self, iteration: int) -> None:
        rows = self.plan.micro_batches * self.plan.rows
        inputs = torch.randn(rows, self.plan.width, generator=torch.Generator().manual_seed(iteration))
        if self.rank == 0:
            self.schedule.step(inputs)
        elif self.rank == self.stages - 1:
            self.schedule.step(target=inputs.sin())
        else:
            self.schedule.step()

    def count_and_die(self, *_: object) -> None:
        self.forwards += 1
        told = self.process == 0 and self.iteration == self.plan.kill and self.rank in self.plan.victims
        if told and self.forwards == self.plan.micro_batches // 2 + 1:
            self.diary.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    Pipeline().run()
