"""The stages of parallel_recovery.py: one pipeline under each system, of which one stage kills itself once.

Started by ftrun or torchrun with what it has to do in PARALLEL, a JSON object. What they note, each in a file of its own, is in
_comparison.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _diary import Diary, born, process_number
from _pipeline_ranks import digest_of
from _strategies_baselines import NAME, Snapshots, load, save, tensors_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

ENGINES = ("replay", "parallel-replay")
Plan = dict[str, Any]


class _Wait(torch.autograd.Function):
    """Takes no processor, as a pass on a device does: so long forward, and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Layers(nn.Module):
    def __init__(self, rank: int, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(rank)
        width = plan["width"]
        blocks = [part for _ in range(plan["layers"]) for part in (nn.Linear(width, width), nn.Tanh())]
        self.blocks, self.seconds = nn.Sequential(*blocks), plan["wait"] / 1000

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.blocks(inputs)
        return _Wait.apply(outputs, self.seconds) if self.seconds else outputs  # type: ignore[no-any-return]


class Training:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.process = plan, process_number()
        self.rank, self.stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = Path(plan["folder"])
        self.diary = Diary(self.folder, self.rank, self.process)
        self.diary.note("born", born())
        self.layers = Layers(self.rank, plan)
        self.optimizer = torch.optim.Adam(self.layers.parameters(), 1e-3)
        self.rows = plan["micro_batches"] * plan["rows"]
        self.samples = torch.randn(4 * self.rows, plan["width"], generator=torch.Generator().manual_seed(1))
        self.now = self.calls = 0
        if plan["system"] in ENGINES:
            import ftcomm.recovery  # not at the top: the others do without
            import ftcomm.torch  # noqa: F401
        self.diary.note("ready")

    def join(self, backend: str) -> None:
        dist.init_process_group(backend)
        self.diary.note("joined")
        self.stage = PipelineStage(self.layers, self.rank, self.stages, torch.device("cpu"))
        self.schedule = Schedule1F1B(self.stage, self.plan["micro_batches"], loss_fn=nn.functional.mse_loss)
        forward = self.stage.forward_one_chunk

        def until_death(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            told = self.process == 0 and self.now == self.plan["kill"] and self.rank == self.plan["victim"]
            if told and self.calls == self.plan["micro_batches"] // 2 + 1:
                self.diary.note("killed")
                os.kill(os.getpid(), signal.SIGKILL)
            return forward(*args, **kwargs)

        self.stage.forward_one_chunk = until_death  # type: ignore[method-assign]

    def begins(self, step: int) -> None:
        self.diary.note("begins", number=step)
        self.now, self.calls = step, 0

    def passes(self, inputs: Tensor) -> None:
        """Forward and backward."""
        if self.rank == 0:
            self.schedule.step(inputs)
        elif self.rank == self.stages - 1:
            self.schedule.step(target=inputs.sin())
        else:
            self.schedule.step()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def engine(self) -> None:
        import ftcomm.recovery
        import ftcomm.torch

        self.join("ftcomm")
        engine = ftcomm.recovery.Engine(
            self.layers,
            self.optimizer,
            self.plan["system"],
            self.folder / "checkpoints",
            checkpoint_every=self.plan["checkpoint"],
            schedule=self.schedule,
        )

        def hear(event: dict[str, Any]) -> None:
            if event["event"] in ("caught-up", "parallel-replay"):
                self.diary.note(event["event"], value=event)

        ftcomm.torch.communicator().job.add_listener(hear)
        loader = DataLoader(TensorDataset(self.samples), batch_size=self.rows)
        for step, (inputs,) in engine.steps(loader, epochs=-(-self.plan["iterations"] // 4)):
            with engine.step():
                self.begins(step)
                self.passes(inputs)
                self.update()
            self.diary.note("iteration", number=step)

    def restarted(self) -> None:
        """All stages begin with what is on the disk; with nothing there, and nobody dead, it is the plain pipeline."""
        plan, system = self.plan, self.plan["system"]
        state, path = tensors_of(self.layers, self.optimizer), self.folder / f"{self.rank}-{NAME}"
        self.join(plan["backend"])
        at = load(path, state) or 0
        self.same_on_all(at)
        snapshots = Snapshots(state, path) if system == "checkfreq" else None
        for step in range(at, plan["iterations"]):
            self.begins(step)
            if system == "checkpoint" and step == plan["checkpoint"] != at:
                save(path, step, state)
                dist.barrier()  # it counts when all stages have theirs
            due = step % plan["every"] == plan["kill"] % plan["every"] and step not in (0, at, plan["kill"])
            if snapshots is not None and due:
                snapshots.begin(step)
            self.passes(self.samples[step % 4 * self.rows :][: self.rows])
            if snapshots is not None:
                snapshots.before_update()
            self.update()
            self.diary.note("iteration", number=step)
        if snapshots is not None:
            snapshots.finish()

    def same_on_all(self, at: int) -> None:
        """Stages write their snapshots when they are ready; a death before the last one has would need the one before."""
        found = torch.tensor([at, -at])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if int(found[0]) != -int(found[1]):
            raise RuntimeError(f"stage {self.rank} has a snapshot of iteration {at}, others have other ones")


def main(plan: Plan) -> None:
    torch.set_num_threads(1)
    training = Training(plan)
    training.engine() if plan["system"] in ENGINES else training.restarted()
    training.diary.note("digest", value=digest_of(p.detach().numpy() for p in training.layers.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(os.environ["PARALLEL"]))
