"""Ranks under the policy replay, such as stages of a pipeline: who dies is replaced and does its steps again out of the logs."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftcomm.communicator import Communicator
from ftcomm.errors import ConfigError, SystemFailure, Unsupported
from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.recovery.data import Share, Source, make_source
from ftcomm.recovery.data.map_source import MapSource
from ftcomm.recovery.determinism import deterministic
from ftcomm.recovery.engine.kind import Kind, Setup
from ftcomm.recovery.engine.logged_groups import LoggedGroups
from ftcomm.recovery.engine.logged_step import LoggedStep
from ftcomm.recovery.engine.saved import RunState
from ftcomm.recovery.engine.stopping import Stopping
from ftcomm.recovery.engine.twins import Twins
from ftcomm.torch.groups import communicator
from ftcomm.torch.shards import sharded

__all__ = ["Staged"]


class Staged(Kind):
    """Each rank has its own state, and a folder of its own for it.

    A process runs the first step of the run before it looks for a checkpoint, in every incarnation: in it a schedule tells the
    stages' shapes around, which belongs to what each process does again (see ``Communicator.resume``). In a job's first process
    that step counts; where there is a checkpoint, that is loaded over what the step has done.

    Raises:
        ConfigError, Unsupported: the model, ``keep`` or ``seed`` can't be used so.
    """

    step: LoggedStep

    def __init__(self, setup: Setup) -> None:
        _check(setup)
        self._setup, self._model = setup, setup.model
        self._comm = communicator()
        self.rank = self._comm.job.rank
        # Replicas of a module draw different samples; all others the whole batch: the first stage needs inputs, the last targets.
        replicas = isinstance(self._model, DistributedDataParallel)
        group = communicator(self._model.process_group) if replicas else None
        self._share, shares = (0, 1) if group is None else (group.rank, group.size)
        self._stages = group is None or group.size < self._comm.size  # also replicated ones
        self.alive = tuple(range(shares))
        self.state = RunState(self._model, True, setup.optimizer, setup.schedulers, setup.scaler, setup.extra)
        self.step = LoggedStep(self._updates)
        self._parallel: Any = None
        if setup.schedule is not None:
            from ftcomm.recovery.engine.parallel import ParallelReplay  # which imports torch's pipelines: half a second

            self._parallel = ParallelReplay(setup.schedule, self._model, self._comm)
        self.folder = None
        if setup.checkpoint_dir is not None:
            self.folder = CheckpointFolder(os.path.join(setup.checkpoint_dir, f"stage-{self.rank}"), setup.keep)
        self._groups: LoggedGroups | None = None  # with checkpoints
        self._twins: Twins | None = None
        self._used: dict[int, tuple[int, int]] = {}  # gradients of the last update
        if self.folder is not None and group is not None and group.size > 1 and _notes_are_cheap(group):
            self._twins = Twins(group, self.state, self._model.module, setup.optimizer)
            self._hook = setup.optimizer.register_step_post_hook(self._updated)
        self._first = True  # the first step of this process is still to come
        self._saved = -1
        self._stopping: Stopping | None = None

    def source(self, loader: Iterable[Any]) -> Source:
        source = make_source(loader, self._share, len(self.alive), keep_batch=False, seed=self._setup.seed)
        if isinstance(source, MapSource) and self._stages:
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

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        if self.folder is not None:
            self._stopping = Stopping(self.rank, self._comm.job.world_size)
        over = False
        try:
            with deterministic(), contextlib.nullcontext() if self._parallel is None else self._parallel.around():
                yield
            over = True
        except GeneratorExit:  # the script has ended the loop
            over = True
            raise
        finally:
            if self._twins is not None:
                self._twins.close()
                self._hook.remove()
            if self._stopping is not None:
                self._stopping.close(over)

    def resume(self) -> None:
        if self.folder is not None:  # the first step comes before the checkpoint
            self._groups = LoggedGroups()

    def meet(self) -> None:
        """Nobody is ever missing: whoever sends or receives something waits for the replacement. But all may be told to leave."""
        step = self.state.progress.step
        if self._first or self._stopping is None or not self._stopping.before(step):
            return
        if self._saved != step:
            if self._leaves_gradients():  # of the script, and the same on all: it updates in some steps only
                self._stopping.postpone()
                return
            if failed := self._save():
                self._say(f"no checkpoint of step {step}: {failed}")
        if self.rank == 0:
            kept = "its state is in a checkpoint"
            if self._saved != step:
                kept = "its state is lost, as a stage could not write its own, and the checkpoint before stays"
            self._say(f"SIGTERM: all leave before step {step}; {kept}")
        self._comm.job.emit("left", step=step)
        sys.exit(0)

    def offer(self, share: Share) -> None:
        self._used.clear()  # only an update of this very step can have used them: others of their names may come
        self._comm.log_position(self.state.progress.step)
        self.step.offer()

    def settle(self) -> frozenset[int] | None:
        return frozenset(self.alive)

    def committed(self) -> None:
        if self.folder is None:
            return
        if self._first:
            self._first = False
            self._build_buckets()
            if self._go_on():
                self._begins()
                return
        if self.state.progress.step % self._setup.every == 0:
            if self._leaves_gradients():
                raise ConfigError(
                    f"Step {self.state.progress.step} is followed by a checkpoint, and has made no update: gradients are in no "
                    "checkpoint. Make checkpoint_every a multiple of the steps of an update, or the micro-batches more."
                )
            if failed := self._save():
                warnings.warn(f"Training goes on without this checkpoint: {failed}", RuntimeWarning, stacklevel=2)
        self._begins()

    def _begins(self) -> None:
        if self._twins is None or self._groups is None:
            return
        # A state is one of a step's begin if no gradients of the step before are needed; those of its update are used up.
        if all(now == used or not grad.any() for grad, now, used in self._gradients_since()):
            self._twins.begins(self._groups, self._saved == self.state.progress.step)

    def _gradients_since(self) -> Iterator[tuple[Any, Any, Any]]:
        for number, grad in enumerate(parameter.grad for parameter in self._model.parameters()):
            if grad is not None:
                yield grad, (id(grad), grad._version), self._used.get(number)

    def _updates(self) -> None:
        if self._twins is not None:
            self._twins.updates()

    def _updated(self, *_: Any) -> None:
        grads = [parameter.grad for parameter in self._model.parameters()]
        self._used = {n: (id(grad), grad._version) for n, grad in enumerate(grads) if grad is not None}

    def finish(self) -> None:
        due = self.folder is not None and not self._first and self._saved != self.state.progress.step
        if due and (failed := self._save()):
            raise failed

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _build_buckets(self) -> None:
        """DDP orders its buckets by its first iteration, collectively, in the forward pass of the next one. A replacement's next
        one comes after its checkpoint, where the others have no such thing: so all do it here."""
        for module in self._model.modules():
            if isinstance(module, DistributedDataParallel) and module.reducer._rebuild_buckets():
                module._has_rebuilt_buckets = True

    def _go_on(self) -> bool:
        """From a replica's state; or from the checkpoint that the log says is the newest; or, in a new log, that all have."""
        assert self._groups is not None
        if self._go_on_like_a_twin():
            return True
        tag, saved = self._groups.resume_from(self._read)
        if tag is None:
            saved = self._agree()
        if saved is None:
            return False
        self._load(saved)
        self._saved = self.state.progress.step
        if self.rank == 0 or tag is not None:
            self._say(f"goes on from the checkpoint of step {self._saved}")
        return True

    def _go_on_like_a_twin(self) -> bool:
        assert self._groups is not None
        if self._twins is None:
            return False
        checkpoints, notes = self._groups.checkpoints(), self._groups.notes()
        if checkpoints and not notes:
            self._say("its log has no note since its checkpoint, to go on from there with a replica's state")
        if not notes or (found := self._twins.fetch(notes)) is None:
            return False
        note, saved = found
        try:
            self._load(saved)
        except Exception as error:
            if not checkpoints:  # which would put right what is half loaded
                raise
            self._say(f"a replica's state can't be loaded here, but the checkpoint can: {error}")
            return False
        self._groups.resume_noted(note)
        if note.endswith(" saved"):
            self._saved = self.state.progress.step
        return True

    def _load(self, saved: dict[str, Any]) -> None:
        self.state.load(saved)
        for parameter in self._model.parameters():
            parameter.grad = None  # of the first step

    def _read(self, tag: Any) -> dict[str, Any]:
        assert self.folder is not None
        saved = self.folder.load(int(tag))
        if saved is None:
            raise SystemFailure(f"The checkpoint of step {tag} of stage {self.rank} is missing or damaged.")
        return saved

    def _agree(self) -> dict[str, Any] | None:
        """Collective: the newest checkpoint that all have whole. A replacement hears from the log what was agreed on then."""
        assert self.folder is not None
        steps, most_seen = self.folder.steps(), -1
        while True:
            mine, saved = -1, None
            while steps and saved is None:
                mine, saved = steps[-1], self.folder.load(steps.pop())
            told = torch.tensor([mine if saved is not None else -1, 0])
            told[1] = -told[0]
            self._comm.all_reduce(told, "min")
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

    def _leaves_gradients(self) -> bool:
        """Whether the last step has made no update: a checkpoint would lack something. (A scaler may have skipped it.)"""
        return not self.step.updated and self._setup.scaler is None

    def _save(self) -> SystemFailure | None:
        """All write theirs, and then it is the one from which replacements go on; if one can't, it is not.

        Older ones go when this one counts, and not before: the log may still need them, however often one can't be written.

        Returns why this rank could not, if it does not count.
        """
        assert self.folder is not None
        assert self._groups is not None
        failed = None
        try:
            self.state.save(self.folder, True, self.alive, prune=False)
        except SystemFailure as error:
            failed = error
        all_saved = torch.tensor([int(failed is None)])
        self._comm.all_reduce(all_saved, "min")
        step = self.state.progress.step
        if not int(all_saved):
            if failed is None:
                self.folder.discard(step)
            return failed
        # By the log, which a process before this one may have written: then this rank has it, whatever becomes of a second try.
        self._saved = step
        self._groups.commit(step)
        self.folder.prune(step)
        return None

    def _say(self, text: str) -> None:
        who = "" if self.rank == 0 else f"rank {self.rank}: "
        print(f"ftcomm: {who}{text}", file=sys.stderr, flush=True)


def _notes_are_cheap(group: Communicator) -> bool:
    """And possible. Where a record has to survive its host, each would wait for the disk."""
    options = group.job.options
    return options.log == "all" and options.durability == "process"


def _check(setup: Setup) -> None:
    model = setup.model
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
            "Sharded models (FSDP) are not supported under the policy 'replay'. Use DistributedDataParallel, or a pipeline."
        )
    if setup.checkpoint_dir is None:
        return
    if any(isinstance(module, DistributedDataParallel) and module.static_graph for module in model.modules()):
        raise ConfigError(
            "static_graph=True is not supported with checkpoints under the policy 'replay': DistributedDataParallel orders its "
            "buckets in a later iteration then, and a replacement would do so when the others do not. Leave it out, or "
            "checkpoint_dir."
        )
    if setup.keep < 2:
        raise ConfigError(
            "keep=1 is too few under the policy 'replay': while a rank dies between writing a checkpoint and its commit, its "
            "replacement needs the one before. Set keep=2 or more."
        )
    if setup.seed is None:
        raise ConfigError(
            "seed=None leaves the random generators alone, and a replacement that goes on from a checkpoint would draw other "
            "numbers than its predecessor. Give a seed, or leave checkpoint_dir out."
        )
