"""The engine: a training loop that goes on, exactly."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftcomm.errors import ConfigError
from ftcomm.recovery._numbers import count, number
from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.recovery.data import make_source
from ftcomm.recovery.engine.gradients import Gradients
from ftcomm.recovery.engine.progress import Progress
from ftcomm.recovery.engine.replicas import check_replicas
from ftcomm.recovery.engine.restorable import Restorable, reseed
from ftcomm.recovery.engine.saved import RunState
from ftcomm.recovery.engine.step import Step
from ftcomm.recovery.strategies import Facts, choose
from ftcomm.torch import join
from ftcomm.torch.groups import communicator

__all__ = ["Engine"]


class Engine:
    """Carries a data-parallel training run over the deaths of its ranks.

    >>> engine = ftcomm.recovery.Engine(ddp, optimizer, checkpoint_dir="ckpt")
    >>> for step, batch in engine.steps(loader):
    ...     with engine.step():
    ...         loss_fn(ddp(batch.x), batch.y).backward()
    ...         optimizer.step(); optimizer.zero_grad()

    A step is all or nothing on every survivor: an update begins when all gradients of all ranks are known to be in the averages
    (with strategy ``lossy``: of all who live), and is finished by all then. Else nothing of the step stays, and ``steps`` gives
    the same batch again. Strategies are described in ``docs/engine.md``. One engine for one model; from the thread that made it.

    Args:
        model: a DistributedDataParallel without a communication hook over ``backend="ftcomm"``; any module if there is one rank.
        optimizer: its optimizer, which makes one step in each step of the engine.
        strategy: ``auto``, ``replication``, ``rollback``, ``lossy`` or ``checkpoint``.
        checkpoint_dir: folder for checkpoints, the same for all ranks of a host; None: none are made.
        checkpoint_every: steps between them.
        keep: how many are kept.
        scheduler, scaler: of the optimizer; or several schedulers. They are stepped in the body, by the script.
        extra: more state that is equal on all ranks, as for ``ftcomm.torch.join_point``: plain values, tensors, objects with
            ``state_dict`` and ``load_state_dict``. Found in ``engine.extra`` afterwards.
        seed: the global generators of Python, NumPy and torch are set at the begin of each step, from it, the step and the
            rank, so that a replacement draws what its predecessor would have. None: they are left alone.
        patience: seconds that survivors wait for a replacement (``replication``).
        keep_batch: survivors take the samples of a dead rank in the same step (``rollback``, ``lossy``); else at the end of the
            epoch.

    Attributes:
        strategy, reason: what was chosen and why.
        step_number: committed steps, when the loop's body begins.
        epoch: of the data, from 0.
        extra: as given, or as it came from the survivors or the checkpoint.

    Raises:
        ConfigError, Unsupported: model, optimizer or strategy can't be used so; the message says why and what can.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        strategy: str = "auto",
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        checkpoint_every: int = 100,
        keep: int = 3,
        scheduler: Any = None,
        scaler: Any = None,
        extra: dict[str, Any] | None = None,
        seed: int | None = 0,
        patience: float = 300.0,
        keep_batch: bool = False,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"Engine takes one torch optimizer, not {type(optimizer).__name__}. Several optimizers, or one for each "
                "parameter, are not carried over failures yet: use ftcomm.torch.join_point and ftcomm.recovery.Undo."
            )
        count("checkpoint_every", checkpoint_every, "steps")
        number("patience", patience, "seconds")
        self.model, self.optimizer = model, optimizer
        self._seed, self._patience, self._keep_batch, self._every = seed, patience, keep_batch, checkpoint_every
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._gradients: Gradients | None = None
        self.rank = 0
        self._slots: tuple[int, ...] = (0,)
        policy = None
        if dist.is_initialized():
            comm = communicator(getattr(model, "process_group", None))
            self._job = comm.job
            self.rank, self._slots, policy = self._job.rank, tuple(comm.slots), comm.policy
        replicas = isinstance(model, DistributedDataParallel)
        if not self._alone:
            self._check_model(replicas)
        self.strategy, self.reason = choose(
            Facts(
                world_size=len(self._slots),
                policy=policy,
                replicas=replicas,
                replaced=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0,
                checkpoints=checkpoint_dir is not None,
            ),
            strategy,
        )
        sync_buffers = False
        if not self._alone:
            self._gradients = Gradients(model)
            # Every rank gets rank 0's buffers before the update, and not, as DDP has it, at the next forward pass: then they are
            # equal at each step's end, and no death can take the only ones along.
            sync_buffers, model.broadcast_buffers = model.broadcast_buffers, False
        several = isinstance(scheduler, Sequence)
        schedulers = [] if scheduler is None else list(scheduler) if several else [scheduler]
        restorable = Restorable(model.module if replicas else model, [optimizer], schedulers, scaler)
        self._state = RunState(model, self._alone, optimizer, schedulers, scaler, extra)
        self._step = Step(model, self._gradients, restorable, self.strategy, sync_buffers)
        self._folder = None if checkpoint_dir is None else CheckpointFolder(checkpoint_dir, keep)
        self._hook = optimizer.register_step_pre_hook(self._step.before_update)
        self._alive: tuple[int, ...] = self._slots
        if self.rank == 0:
            print(f"ftcomm: strategy {self.strategy.name}: {self.reason}", file=sys.stderr, flush=True)

    def _check_model(self, replicas: bool) -> None:
        if not replicas:
            raise ConfigError(
                f"Engine needs a DistributedDataParallel where there are several ranks, not {type(self.model).__name__}: it has "
                "to know whose gradients are in the averages. Wrap the model; sharded models (FSDP2) are not supported yet."
            )
        if self._slots != tuple(range(len(self._slots))) or len(self._slots) != self._job.world_size:
            raise ConfigError("Engine needs a DistributedDataParallel over all ranks of the job, in their order.")

    @property
    def step_number(self) -> int:
        """Committed steps."""
        return self.progress.step

    @property
    def committed(self) -> bool:
        """Whether the last ``with engine.step():`` is a part of the run; if not, the loop gives its batch again."""
        return self._step.stepped and not self._step.inside and not self._step.dropped

    @property
    def epoch(self) -> int:
        """Of the data, from 0."""
        return 0 if self._state.source is None else int(self._state.source.epoch)

    @property
    def extra(self) -> dict[str, Any]:
        """As given, or as it came from the survivors or the checkpoint."""
        return self._state.extra

    @property
    def progress(self) -> Progress:
        """Steps, replacements and what was done again so far, the same on all ranks."""
        return self._state.progress

    def steps(self, loader: Iterable[Any], epochs: int = 1) -> Iterator[tuple[int, Any]]:
        """Steps and their batches until ``epochs`` epochs are over, counted from the begin of the run.

        Goes on where the newest checkpoint, or the survivors, are. Gives a step again that was dropped. What it does with the
        loader is in ``docs/data.md``. Collective: each rank goes through the same steps.
        """
        if self._state.source is not None:
            raise ConfigError(
                "engine.steps() was called before. Give it the number of epochs: engine.steps(loader, epochs=10)."
            )
        source = make_source(loader, self.rank, len(self._slots), keep_batch=self._keep_batch, seed=self._seed)
        self._state.source = source
        try:
            self._resume()
            while True:
                self._meet()
                share = self._draw(epochs)
                if share is None:
                    break
                self._step.offer(self._alive, share.samples * len(self._alive) / share.total)
                if self._seed is not None:  # here, and not in step(): the body may draw before it
                    reseed(self._seed, self.progress.step, self.rank)
                yield self.progress.step, share.batch
                if not self._step.stepped:
                    raise ConfigError("The loop's body has to be inside `with engine.step():`.")
                self._after_step()
            self._save(wait=True)
        finally:
            source.close()
            self._hook.remove()
            if self._folder is not None:
                self._folder.close()
        if self.rank == min(self._alive):
            print(f"ftcomm: {self.progress.words()}", file=sys.stderr, flush=True)

    def step(self) -> Step:
        """A context manager around forward pass, backward pass and update: all or nothing on every survivor."""
        return self._step

    def _draw(self, epochs: int) -> Any:
        source: Any = self._state.source
        while source.epoch < epochs:
            if (share := source.draw(self._alive)) is not None:
                return share
            source.next_epoch()
        return None

    def _after_step(self) -> None:
        progress, step = self.progress, self._step
        if step.dropped:
            progress.dropped += 1
            if not self._alone:
                self._job.emit("step-dropped", step=progress.step, missing=sorted(step.missing))
                join.set_step(self.model, progress.step)
            return
        source: Any = self._state.source
        source.commit(step.contributed)
        progress.step += 1
        progress.lossy += bool({*self._alive} - step.contributed)
        if progress.step % self._every == 0:
            self._save(wait=False)

    def _meet(self) -> None:
        """A step is about to begin: who is there?"""
        if self._alone:
            return
        patience = self._patience if self.strategy.waits else None
        here = join.enter(self.model, self.optimizer, self._state.named(), patience)
        self._alive = here.alive
        self._state.take(here.extra)
        if here.joined:
            assert self._gradients is not None
            self._gradients.look_at_buckets()
            self.progress.joined += len(here.joined)
            tensors = check_replicas(join.everybody(self.model), self.model, [self.optimizer])
            self._job.emit("replicas-equal", step=here.step, tensors=tensors, joined=list(here.joined))

    def _resume(self) -> None:
        if not self._alone and self._job.joining:
            # It gets the survivors' state, and they wait from when it asks: what takes long comes before.
            assert self._state.source is not None
            self._state.source.warm()
            self._job.emit("asking")
            return
        if self._state.resume(self._folder) and self.rank == 0:
            print(f"ftcomm: goes on from the checkpoint of step {self.progress.step}", file=sys.stderr, flush=True)

    def _save(self, wait: bool) -> None:
        if self._folder is not None and self.rank == min(self._alive):
            self._state.save(self._folder, wait)
