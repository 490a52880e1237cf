"""Ranks that each have a state of their own, such as stages of a pipeline: data, and checkpoints that count for all or none."""

from __future__ import annotations

import os
import sys
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ftcomm.communicator import Communicator
from ftcomm.errors import ConfigError, SystemFailure, Unsupported
from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.recovery.data import Share, Source, make_source
from ftcomm.recovery.data.map_source import MapSource
from ftcomm.recovery.engine.kind import Kind, Setup, check_parameters
from ftcomm.recovery.engine.logged_step import LoggedStep
from ftcomm.recovery.engine.saved import RunState
from ftcomm.torch.groups import communicator
from ftcomm.torch.modules import ddps_in
from ftcomm.torch.shards import sharded

__all__ = ["Stage"]


class Stage(Kind):
    """One rank's. Its checkpoints are in a folder of its own; one of them counts when all ranks have theirs of that step.

    A process runs the first step of the run before it looks for a checkpoint, in every start: in it a schedule tells the stages'
    shapes around, and DistributedDataParallel averages in another order. In a job's first process that step counts; where there
    is a checkpoint, that is loaded over what the step has done, and the steps after it have the bits that they would have had.

    Args:
        everybody: all ranks of the job; they agree over it.

    Raises:
        ConfigError, Unsupported: the model can't be used so.
    """

    step: LoggedStep

    def __init__(self, setup: Setup, everybody: Communicator) -> None:
        _check_model(setup.model)
        if setup.checkpoint_dir is not None:  # else nothing is saved, and a replacement does all steps again
            check_parameters(setup)
        self._check(setup)
        self._setup, self._model, self._everybody = setup, setup.model, everybody
        self.rank = everybody.job.rank
        # Replicas of a module draw different samples; all others the whole batch: the first stage needs inputs, the last targets.
        self._replicas = _replicas(self._model)
        self._share, shares = (0, 1) if self._replicas is None else (self._replicas.rank, self._replicas.size)
        self._of_pipeline = shares < everybody.size  # also replicated stages
        self.alive = tuple(range(shares))
        self.state = RunState(self._model, True, setup.optimizer, setup.schedulers, setup.scaler, setup.extra)
        self.folder = None
        if setup.checkpoint_dir is not None:
            self.folder = CheckpointFolder(os.path.join(setup.checkpoint_dir, f"stage-{self.rank}"), setup.keep)
        self._first = True  # the first step of this process is still to come
        self._saved = -1  # the step of the newest checkpoint
        self._scale: dict[str, Any] = {}  # of a scaler, when the step began

    def _check(self, setup: Setup) -> None:
        """Raises ConfigError."""

    def source(self, loader: Iterable[Any]) -> Source:
        source = make_source(loader, self._share, len(self.alive), keep_batch=False, seed=self._setup.seed)
        if isinstance(source, MapSource) and self._of_pipeline:
            shares, slots = source.shares, len(self.alive)
            if not shares.drop_last and (rest := shares.samples % (slots * shares.batch_size)):
                source.close()
                each = f", shared out over {slots} replicas" if slots > 1 else ""
                raise ConfigError(
                    f"The last step of an epoch would have {rest} samples{each}, not {slots * shares.batch_size}, and the stages "
                    "of a pipeline have told each other their shapes in the first step. Give the DataLoader drop_last=True, or a "
                    f"batch_size with which {shares.samples} samples make whole steps."
                )
        return source

    def offer(self, share: Share) -> None:
        if self._setup.scaler is not None:
            self._scale = dict(self._setup.scaler.state_dict())
        self.step.offer()

    def settle(self) -> frozenset[int] | None:
        return frozenset(self.alive)

    def committed(self) -> None:
        if self.folder is None:
            return
        self.state.gradients.warn()
        if self._first:
            self._first = False
            self._build_buckets()
            if self._go_on():
                return
        self._save_if_due()

    def finish(self) -> None:
        due = self.folder is not None and not self._first and self._saved != self.state.progress.step
        if due and (failed := self._save()):
            raise failed

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _build_buckets(self) -> None:
        """DDP orders its buckets by its first iteration, collectively, in the forward pass of the next one. A replacement's next
        one comes after its checkpoint, where the others have no such thing: so all do it here."""
        for ddp in ddps_in(self._model):
            if ddp.reducer._rebuild_buckets():
                ddp._has_rebuilt_buckets = True

    @abstractmethod
    def _go_on(self) -> bool:
        """The first step is over: loads what there is of a later one; False if there is nothing."""

    @abstractmethod
    def _counts(self, step: int) -> None:
        """All ranks have written their checkpoint of this step."""

    def _save_if_due(self) -> None:
        step = self.state.progress.step
        if step % self._setup.every:
            return
        if self._leaves_gradients():
            raise ConfigError(
                f"Step {step} is followed by a checkpoint, and has made no update: gradients are in no checkpoint. Make "
                "checkpoint_every a multiple of the steps of an update, or the micro-batches more."
            )
        if failed := self._save():
            warnings.warn(f"Training goes on without this checkpoint: {failed}", RuntimeWarning, stacklevel=3)

    def _leaves_gradients(self) -> bool:
        """Whether the last step has made no update: a checkpoint would lack something.

        A scaler may have skipped it, and has changed its scale then. Gradients would not say it: they may be infinite on one
        stage only, and all have to find the same.
        """
        scaler = self._setup.scaler
        return not self.step.updated and (scaler is None or scaler.state_dict() == self._scale)

    def _save(self) -> SystemFailure | None:
        """All write theirs, and then it is the one from which the run goes on; if one can't, it is not.

        Older ones go when this one counts, and not before: they may still be needed, however often one can't be written.

        Returns why this rank could not, if it does not count.
        """
        assert self.folder is not None
        failed = None
        try:
            self.state.save(self.folder, True, self.alive, prune=False)
        except SystemFailure as error:
            failed = error
        all_saved = torch.tensor([int(failed is None)])
        self._everybody.all_reduce(all_saved, "min")
        step = self.state.progress.step
        if not int(all_saved):
            if failed is None:
                self.folder.discard(step)
            return failed
        self._saved = step
        self._counts(step)
        self.folder.prune(step)
        return None

    def _load(self, saved: dict[str, Any]) -> None:
        assert self.folder is not None
        self.state.load(saved, self.folder)  # also which parameters have a gradient: those of the first step are gone

    def _read(self, tag: Any) -> dict[str, Any]:
        assert self.folder is not None
        saved = self.folder.load(int(tag))
        if saved is None:
            raise SystemFailure(f"The checkpoint of step {tag} of stage {self.rank} is missing or damaged.")
        return saved

    def _agree(self) -> dict[str, Any] | None:
        """Collective: the newest checkpoint that all have whole."""
        assert self.folder is not None
        steps, most_seen = self.folder.steps(), -1
        while True:
            mine, saved = -1, None
            while steps and saved is None:
                mine, saved = steps[-1], self.folder.load(steps.pop())
            told = torch.tensor([mine if saved is not None else -1, 0])
            told[1] = -told[0]
            self._everybody.all_reduce(told, "min")
            least, most = int(told[0]), -int(told[1])
            most_seen = max(most_seen, most)
            if least == most:
                break
            if self.rank == 0:
                self._say(f"not all stages have the checkpoint of step {most} whole; trying the one before")
            steps = [step for step in self.folder.steps() if step <= least]
        if least < 0:
            if self.rank == 0 and most_seen >= 0:
                self._say("there is no checkpoint that all stages have whole: begins with the first step")
            return None
        return saved if mine == least and saved is not None else self._read(least)

    def _last_words(self) -> None:
        """All leave before the next step, by SIGTERM: the newest checkpoint is to be one of it."""
        step = self.state.progress.step
        failed = None
        if self._saved != step and self.folder is not None and (failed := self._save()):
            self._say(f"no checkpoint of step {step}: {failed}")
        if self.rank == 0:
            kept = "its state is in a checkpoint"
            if self.folder is None:
                kept = "its state is lost, as there is no checkpoint_dir"
            elif self._saved != step:
                kept = "its state is lost, as a stage could not write its own, and the checkpoint before stays"
            self._say(f"SIGTERM: all leave before step {step}; {kept}")
        self._everybody.job.emit("left", step=step)
        sys.exit(0)

    def _say(self, text: str) -> None:
        who = "" if self.rank == 0 else f"rank {self.rank}: "
        print(f"ftcomm: {who}{text}", file=sys.stderr, flush=True)


def _replicas(model: Any) -> Communicator | None:
    """Of the replicas of what this rank has, wherever in it DistributedDataParallel is; None: there are none.

    Raises:
        ConfigError: not all of it has the same replicas.
    """
    groups = {group.slots: group for group in (communicator(ddp.process_group) for ddp in ddps_in(model))}
    if len(groups) > 1:
        found = " and ".join(str(list(slots)) for slots in groups)
        raise ConfigError(
            f"The model has DistributedDataParallel over ranks {found}: the replicas of a rank draw different samples, and it is "
            "not clear which ranks those are. Give all that a rank has the same process group."
        )
    return next(iter(groups.values()), None)


def _check_model(model: Any) -> None:
    if hasattr(model, "submod"):
        raise ConfigError(
            f"Engine needs what the stage was made of, not the {type(model).__name__}: PipelineStage(layers, ...) and "
            "Engine(layers, optimizer). With several stages on a rank: Engine(nn.ModuleList([...]), optimizer)."
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"Engine needs a module, not {type(model).__name__}.")
    # By the name of the class: importing FSDP takes longer than many a recovery.
    if sharded(model) or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise Unsupported(
            "Sharded models (FSDP) are supported neither under the policy 'replay' nor as stages of a pipeline. Use "
            "DistributedDataParallel for the stages."
        )
