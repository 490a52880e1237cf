"""Replicas under the policy lossy, or one rank alone: survivors go on, and replacements get their state."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftcomm import exit_code
from ftcomm.errors import ConfigError, PeerFailure
from ftcomm.launch import preempt
from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.recovery.data import Share, Source, make_source
from ftcomm.recovery.engine.gradients import Gradients
from ftcomm.recovery.engine.kind import Kind, Setup, check_parameters
from ftcomm.recovery.engine.replicas import check_replicas
from ftcomm.recovery.engine.restorable import Restorable
from ftcomm.recovery.engine.saved import RunState
from ftcomm.recovery.engine.schedules import Schedules
from ftcomm.recovery.engine.step import Step
from ftcomm.recovery.strategies import Strategy
from ftcomm.torch import join
from ftcomm.torch.modules import unwrapped
from ftcomm.torch.shards import sharded

__all__ = ["Replicated"]


class Replicated(Kind):
    """The model's communicator is ``comm``; None without a process group.

    Raises:
        ConfigError: the model can't be used so.
    """

    step: Step

    def __init__(self, setup: Setup, strategy: Strategy, comm: Any) -> None:
        model, self._optimizer = setup.model, setup.optimizer
        self._model, self._setup, self._strategy = model, setup, strategy
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._job: Any = getattr(comm, "job", None)
        self.rank = 0 if self._job is None else self._job.rank
        self._slots: tuple[int, ...] = (0,) if comm is None else tuple(comm.slots)
        self._gradients: Any = None
        checkpoints = setup.checkpoint_dir is not None
        if not self._alone or checkpoints:
            check_parameters(setup)
        if not self._alone:
            self._check_model()
            if sharded(model):
                # Brings FSDP2, which other models do not need.
                from ftcomm.recovery.engine.sharded import ShardedGradients

                self._gradients = ShardedGradients(model, strategy.drops, checkpoints)
            else:
                self._gradients = Gradients(model)
            if strategy.waits:  # a goodbye would let the others train on without this rank, and to other bits
                comm.job.needed = True
                exit_code.watch()  # sys.exit(1) is a failure, too
        restorable = Restorable(unwrapped(model), [setup.optimizer], setup.schedulers, setup.scaler)
        self.state = RunState(model, self._alone, setup.optimizer, setup.schedulers, setup.scaler, setup.extra)
        schedules = Schedules(setup.optimizer, setup.schedulers)
        self.step = Step(model, self._gradients, restorable, strategy, schedules, checkpoints)
        self.folder = None if setup.checkpoint_dir is None else CheckpointFolder(setup.checkpoint_dir, setup.keep)
        self.alive = self._slots
        self._samples = 0  # of this rank in the present step
        self._lost: int | None = None  # batches, as was told last
        self._look_again = False  # at the replicas, when those who have come in have made a step

    def _check_model(self) -> None:
        if not isinstance(self._model, DistributedDataParallel) and not sharded(self._model):
            raise ConfigError(
                "Engine needs a DistributedDataParallel, or a model that fully_shard() was applied to, where there are several "
                f"ranks, not {type(self._model).__name__}: it has to know whose gradients are in the averages. Wrap the model; "
                "for the stages of a pipeline give Engine its schedule=, or start with ftrun --policy replay."
            )
        if self._slots != tuple(range(len(self._slots))) or len(self._slots) != self._job.world_size:
            raise ConfigError("Engine needs a model over all ranks of the job, in their order.")

    def source(self, loader: Iterable[Any]) -> Source:
        how = self._setup
        return make_source(loader, self.rank, len(self._slots), keep_batch=how.keep_batch, seed=how.seed)

    def resume(self) -> None:
        if not self._alone and self._job.joining:
            # It gets the survivors' state, and they wait from when it asks: what takes long comes before.
            assert self.state.source is not None
            self.state.source.warm()
            self._job.emit("asking")
            return
        if self.state.resume(self.folder) and self.rank == 0:
            step = self.state.progress.step
            print(f"ftcomm: goes on from the checkpoint of step {step}", file=sys.stderr, flush=True)

    def meet(self, epochs: int) -> None:
        if self._alone:
            if preempt.requested():
                self._last_words(self.alive)
                sys.exit(0)
            return
        self.step.between()
        patience = self._setup.patience if self._strategy.waits else None
        # Who comes in has its place from the others.
        place = None if self._job.joining or self.state.source is None else self.state.source.place(epochs)
        here = join.enter(self._model, self._optimizer, self.state.named(), patience, self._last_words, place)
        gone, writer = {*self.alive} - {*here.alive}, min(self.alive)
        self.alive = here.alive
        self.state.take(here.extra)
        if self._strategy.ends and (gone or here.joined):
            if self.state.gathered is None:  # every replica has the last whole step
                self._save(wait=True)
            self.step.end_without(gone | {*here.joined})
        if here.joined:
            self._gradients.joined()
            self.state.progress.joined += len(here.joined)
        if here.joined or gone:  # the same on all: who was not at the last begin has `joined`
            self._job.emit("replicas-equal", step=here.step, tensors=self._check_equal(), joined=list(here.joined))
        elif self._look_again:
            self._check_equal()
        self._look_again = bool(here.joined)
        if writer in gone | {*here.joined} and self.state.gathered is None and self.state.progress.step:
            # Who was to write it may have died before it had. Not who has come in, which does not know whom it follows.
            self._save_if_due(min({*here.alive} - {*here.joined}))

    def _check_equal(self) -> int:
        """Also one step after somebody has come in: what the script has got no hold of there shows only when it is used."""
        buffers = (
            sharded(self._model) or self._gradients.shares_buffers
        )  # broadcast_buffers=False: each rank has its own
        return check_replicas(
            join.everybody(self._model), self._model, [self._optimizer], join.shards(self._model), buffers
        )

    def offer(self, share: Share) -> None:
        self._samples = share.samples
        self.step.offer(self.alive, share.samples * len(self.alive) / share.total)

    def settle(self) -> frozenset[int] | None:
        step, progress = self.step, self.state.progress
        step.decide()
        if not step.dropped:
            return step.contributed
        progress.dropped += 1
        if not self._alone:
            missing = sorted(step.missing)
            self._job.emit(
                "step-dropped",
                step=progress.step,
                missing=missing,
                samples=self._samples,
                undo=round(step.undo_seconds, 6),
            )
            join.set_step(self._model, progress.step)
        return None

    def committed(self) -> None:
        self.state.gradients.warn()
        lost = self.state.source.lost_batches if self.state.source is not None else 0
        if lost != self._lost and not self._alone:
            self._lost = lost
            self._job.emit("data", lost_batches=lost)
        self._save_if_due(min(self.alive))

    def _save_if_due(self, writer: int) -> None:
        if self.state.progress.step % self._setup.every == 0:
            self._save(wait=False, writer=writer)

    def finish(self) -> None:
        self.step.between()
        self._save(wait=True)

    def _last_words(self, there: tuple[int, ...]) -> None:
        """SIGTERM, and nobody is left afterwards who has this step's state."""
        self.alive = there
        kept = "its state is in a checkpoint" if self.folder is not None else "lost, as there is no checkpoint_dir"
        try:
            self._save(wait=True)
        except PeerFailure as failure:  # who holds shards is dead: an older checkpoint has them
            kept = f"its state is lost, and the newest checkpoint stays: {failure}"
        if self.rank == min(there):
            step = self.state.progress.step
            print(f"ftcomm: SIGTERM: all leave before step {step}; {kept}", file=sys.stderr, flush=True)

    def _save(self, wait: bool, writer: int | None = None) -> None:
        """``writer``: of replicas; None: the lowest."""
        writes = self.rank == (min(self.alive) if writer is None else writer)
        if self.folder is not None and (writes or self.state.gathered is not None):
            self.state.save(self.folder, wait, self.alive)
