"""The ranks of strategies.py: one training run under each system, of which a rank kills itself once.

Started by ftrun, torchrun, _torchft.py or _elastic.py with what to do in STRATEGY, a JSON object. A rank notes, with an iteration
number, "begins", when it is about to compute it, and "iteration", when its update is done; "born" is when the process started,
and "ready" when it has its imports, model and optimizer behind it and is about to turn to the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _diary import Diary, born, process_number
from _models import GPT, ResNet, gpt_batch, resnet_batch
from _strategies_baselines import NAME, Snapshots, load, put_back, save, tensors_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

ENGINES = ("replication", "rollback", "lossy", "replay")
SAMPLES, AFTER = 1024, 3


class Plan:
    """What the driver asks for."""

    system: str
    backend: str  # of the systems that are no engine
    model: str
    batch: int
    first: int  # iteration: those before it are left out, for nothing depends on them
    checkpoint: int  # a checkpoint of all is made at the begin of this iteration
    every: int  # snapshots are made at the begin of iterations that this divides
    kill: int  # the victim dies at the begin of this iteration
    victim: int  # or -1
    last: int  # iteration
    folder: str

    def __init__(self) -> None:
        self.__dict__.update(json.loads(os.environ["STRATEGY"]))


class Training:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.process = plan, process_number()
        self.folder = Path(plan.folder)
        self.rank = int(os.environ.get("REPLICA_GROUP_ID") or os.environ["RANK"])
        self.world = 4 if "REPLICA_GROUP_ID" in os.environ else int(os.environ["WORLD_SIZE"])
        self.diary = Diary(self.folder, self.rank, self.process)
        self.diary.note("born", born())
        torch.manual_seed(0)
        made = resnet_batch if plan.model == "resnet" else gpt_batch
        self.data = TensorDataset(*made(SAMPLES))
        self.model = ResNet() if plan.model == "resnet" else GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.state = [] if plan.system in (*ENGINES, "torchft") else tensors_of(self.model, self.optimizer)
        self.loss = 0.0
        if plan.system in ENGINES:
            from ftcomm.recovery import Engine  # not at the top: the others do without

            self.engine_of = Engine
        self.diary.note("ready")

    def batch(self, iteration: int) -> tuple[Tensor, ...]:
        size = self.plan.batch
        at = (iteration * self.world + self.rank) * size % (SAMPLES - size)
        found: tuple[Tensor, ...] = self.data[at : at + size]
        return found

    def begins(self, iteration: int) -> None:
        self.diary.note("begins", number=iteration)
        if iteration == self.plan.kill and self.rank == self.plan.victim and self.process == 0:
            self.diary.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    def backward(self, model: Any, batch: Sequence[Tensor]) -> None:
        loss = model(*batch)
        loss.backward()
        self.loss = loss.item()

    def ended(self, iteration: int) -> None:
        """An iteration's update is done."""
        self.diary.note("iteration", number=iteration)
        if (
            iteration == self.plan.kill + 1
        ):  # in undisturbed runs to compare with; the driver leaves out the span after it
            self.compare(iteration)

    def compare(self, iteration: int) -> None:
        weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        updates = {int(state["step"]) for state in self.optimizer.state.values()}
        self.diary.note(
            "end",
            number=iteration,
            digest=hashlib.sha256(weights).hexdigest()[:16],
            updates=sorted(updates),
            loss=self.loss,
        )

    # ours

    def engine(self) -> None:
        dist.init_process_group("ftcomm")
        ddp = DistributedDataParallel(self.model)
        more: dict[str, Any] = {}
        if self.plan.system == "replay":
            every = self.plan.checkpoint - self.plan.first
            more = {"checkpoint_dir": self.folder / "checkpoints", "checkpoint_every": every}
        engine = self.engine_of(ddp, self.optimizer, self.plan.system, **more)
        until = self.plan.last if self.plan.system == "replay" or self.plan.victim < 0 else None
        for step, batch in engine.steps(DataLoader(self.data, self.plan.batch), epochs=1 << 30):
            iteration = self.plan.first + step
            with engine.step():
                self.begins(iteration)
                self.backward(ddp, batch)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if engine.committed:
                self.ended(iteration)
                # The same on all ranks: the plan's last one, or some after the replacement has come in (under replay all wait).
                if engine.progress.joined and until is None:
                    until = max(iteration + AFTER, self.plan.kill + 1)
                if iteration == until:
                    break
        self.compare(iteration)

    # the others

    def join(self, job: int = 0) -> Any:
        if self.plan.backend == "ftcomm":
            elastic = self.plan.system == "elastic"
            if elastic:  # a second job in one process gets the name of the first and ".1"
                os.environ["FTCOMM_JOB"] = "round.1" if self.process else "round"
            store = f"file://{self.folder}/store-{job}" if elastic else "env://"
            dist.init_process_group("ftcomm", init_method=store, rank=self.rank, world_size=self.world)
        else:
            dist.init_process_group("gloo")
        self.diary.note("joined")
        return DistributedDataParallel(self.model, init_sync=not job)

    def train(self, ddp: Any, at: int, snapshots: Snapshots | None = None) -> None:
        plan = self.plan
        for iteration in range(at, plan.last + 1):
            self.begins(iteration)
            if plan.system == "checkpoint" and iteration == plan.checkpoint and self.rank == 0 and at != iteration:
                save(self.folder / NAME, iteration, self.state)
            if snapshots is not None and iteration % plan.every == 0 and iteration not in (at, plan.kill):
                snapshots.begin(iteration)
            self.backward(ddp, self.batch(iteration))
            if snapshots is not None:
                snapshots.before_update()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ended(iteration)
        if snapshots is not None:
            snapshots.finish()

    def restarted(self) -> None:
        """Global checkpointing and CheckFreq: all begin with what is on the disk."""
        ddp = self.join()
        at = load(self.folder / NAME, self.state)
        writes = self.plan.system == "checkfreq" and self.rank == 0
        self.train(
            ddp, self.plan.first if at is None else at, Snapshots(self.state, self.folder / NAME) if writes else None
        )

    def elastic(self) -> None:
        """Elastic Horovod: survivors put back what they committed last and wait for the replacement in a new job; there one of
        them gives all the others its state, before training goes on."""
        snapshots = Snapshots(self.state)
        if self.process == 0:
            try:
                self.train(self.join(), self.plan.first, snapshots)
                return
            except RuntimeError:  # as HorovodInternalError
                if self.plan.victim < 0:
                    raise
            snapshots.finish()
            dist.destroy_process_group()
            self.optimizer.zero_grad()
        ddp = self.join(1)
        if snapshots.newest is not None:
            put_back(self.state, snapshots.newest[1])
        has = torch.tensor([self.world - self.rank if snapshots.newest else 0])
        dist.all_reduce(has, dist.ReduceOp.MAX)
        source = self.world - int(has)
        at = torch.tensor([snapshots.newest[0] if snapshots.newest else 0])
        for tensor in [at, *self.state]:
            dist.broadcast(tensor, source)
        self.train(ddp, int(at), snapshots)

    def torchft(self) -> None:
        from _torchft import Worker

        worker = Worker(self.model, self.optimizer)
        manager, fewer, until = worker.manager, self.process > 0, None
        while True:
            step = manager.current_step()
            self.begins(self.plan.first + step)
            worker.optimizer.zero_grad()
            self.backward(worker.ddp, self.batch(self.plan.first + step))
            worker.optimizer.step()
            if manager.current_step() == step:
                continue
            iteration = self.plan.first + manager.current_step() - 1
            self.ended(iteration)
            here = manager.num_participants()
            fewer = fewer or here < self.world
            if fewer and here == self.world and until is None and iteration >= self.plan.kill:
                until = iteration + AFTER  # the same on all: they are in one quorum
            if iteration == (until if self.plan.victim >= 0 else self.plan.last):
                break
        self.compare(iteration)
        manager.shutdown(wait=False)


def main() -> None:
    torch.set_num_threads(1)
    training = Training(Plan())
    system = training.plan.system
    if system in ENGINES:
        training.engine()
    elif system == "torchft":
        training.torchft()
        return
    elif system == "elastic":
        training.elastic()
    elif system == "plain":
        training.train(training.join(), training.plan.first)
    else:
        training.restarted()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
