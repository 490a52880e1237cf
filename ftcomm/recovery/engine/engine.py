"""The engine: a training loop that goes on, exactly."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftcomm.errors import ConfigError
from ftcomm.launch import preempt
from ftcomm.launch.launchers import launcher
from ftcomm.recovery._numbers import count, number
from ftcomm.recovery.engine.bar import Bar
from ftcomm.recovery.engine.kind import Kind, Setup
from ftcomm.recovery.engine.progress import Progress
from ftcomm.recovery.engine.replicated import Replicated
from ftcomm.recovery.engine.restarted import Restarted
from ftcomm.recovery.engine.restorable import reseed
from ftcomm.recovery.engine.staged import Staged
from ftcomm.recovery.strategies import Facts, choose
from ftcomm.torch.groups import communicator
from ftcomm.torch.modules import ddps_in
from ftcomm.torch.shards import Shards, sharded

__all__ = ["Engine"]


class Engine:
    """Carries a training run over the deaths of its ranks.

    >>> engine = ftcomm.recovery.Engine(ddp, optimizer, checkpoint_dir="ckpt")
    >>> for step, batch in engine.steps(loader):
    ...     with engine.step():
    ...         loss_fn(ddp(batch.x), batch.y).backward()
    ...         optimizer.step(); optimizer.zero_grad()

    A step is all or nothing on every survivor: an update begins when all gradients of all ranks are known to be in the averages
    (with strategy ``lossy``: of all who live), and is finished by all then. Else nothing of the step stays, and ``steps`` gives
    the same batch again. With strategy ``replay``, which is for the stages of a pipeline as well, every step is committed: who
    dies in one is replaced, and does it again out of the logs. Strategies are described in ``docs/engine.md``. One engine for one
    model; from the thread that made it.

    Args:
        model: over ``backend="ftcomm"`` a DistributedDataParallel without a communication hook, or a module that
            ``fully_shard()`` was applied to; any module if there is one rank, with a ``schedule``, or under the policy ``replay``
            (there the module, or ModuleList, that this rank's stages were made of).
        optimizer: its optimizer, which makes one step in each step of the engine.
        strategy: ``auto``, ``replication``, ``rollback``, ``lossy``, ``replay``, ``parallel-replay`` or ``checkpoint``.
        checkpoint_dir: folder for checkpoints, the same for all ranks of a host; None: none are made. With ``replay``, or a
            ``schedule``, each rank has a folder ``stage-<rank>`` in it.
        checkpoint_every: steps between them.
        keep: how many are kept.
        scheduler, scaler: of the optimizer; or several schedulers. They are stepped in the body, by the script.
        extra: more state that is equal on all ranks, as for ``ftcomm.torch.join_point``: plain values, tensors, objects with
            ``state_dict`` and ``load_state_dict``. The script may change the dictionary, and finds in it what came from others.
        seed: the global generators of Python, NumPy and torch are set at the begin of each step, from it, the step and the
            rank, so that a replacement draws what its predecessor would have. None: they are left alone.
        patience: seconds that survivors wait for a replacement (``replication``).
        schedule: of the pipeline (torch.distributed.pipelining). It says that the ranks have different stages, which under other
            policies than ``replay`` could be replicas that were not wrapped. For ``parallel-replay`` each rank has one stage.
        keep_batch: survivors take the samples of a dead rank in the same step (``rollback``, ``lossy``); else at the end of the
            epoch.

    Attributes:
        strategy, reason: what was chosen and why.
        step_number: committed steps, when the loop's body begins.
        epoch: of the data, from 0.
        extra: the dictionary that was given, with what came from the survivors or the checkpoint.

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
        schedule: Any = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"Engine takes one torch optimizer, not {type(optimizer).__name__}. Several optimizers, or one for each "
                "parameter, are not carried over failures yet: use ftcomm.torch.join_point and ftcomm.recovery.Undo."
            )
        if extra is not None and not (isinstance(extra, dict) and all(isinstance(name, str) for name in extra)):
            raise ConfigError("extra= is a dictionary, with strings as names.")
        for name, value in (extra or {}).items():
            if isinstance(value, torch.optim.Optimizer):
                raise ConfigError(
                    f"extra[{name!r}] is an optimizer, and its update would be made also in a step that is dropped. Give Engine "
                    "one optimizer, with a group for each part of the model (torch.optim.AdamW([{'params': ...}, ...])), or use "
                    "ftcomm.torch.join_point and ftcomm.recovery.Undo."
                )
        checkpoint_every = count("checkpoint_every", checkpoint_every, "steps")
        patience = number("patience", patience, "seconds")
        self.model, self.optimizer = model, optimizer
        comm = communicator(getattr(model, "process_group", None)) if dist.is_initialized() else None
        under = launcher(os.environ)
        size = 1 if comm is None else comm.job.world_size
        logged = comm is not None and comm.policy == "replay"
        replicas = bool(ddps_in(model)) if logged else isinstance(model, DistributedDataParallel)
        stages, shards = False, None
        if comm is not None and not logged:
            stages = schedule is not None and size > 1 and not (replicas and comm.size == size)
            shards = Shards(model, comm.size) if sharded(model) and not stages else None
        self.strategy, self.reason = choose(
            Facts(
                world_size=size,
                policy=None if comm is None else comm.policy,
                replicas=replicas,
                replaced=under.replaces,
                all_end=under.ends_all,
                checkpoints=checkpoint_dir is not None,
                sharded=shards is not None,
                twins=shards is not None and shards.replicated,
                stages=stages,
            ),
            strategy,
        )
        if schedule is None and self.strategy.name == "parallel-replay":
            raise ConfigError(
                "strategy='parallel-replay' needs the pipeline's schedule, whose micro-batches are shared out: "
                "Engine(layers, optimizer, strategy='parallel-replay', schedule=schedule)."
            )
        several = isinstance(scheduler, Sequence)
        setup = Setup(
            model=model,
            optimizer=optimizer,
            schedulers=[] if scheduler is None else list(scheduler) if several else [scheduler],
            scaler=scaler,
            extra=extra,
            checkpoint_dir=checkpoint_dir,
            keep=keep,
            every=checkpoint_every,
            seed=seed,
            patience=patience,
            keep_batch=keep_batch,
            schedule=schedule if self.strategy.name == "parallel-replay" else None,
        )
        self._kind: Kind
        if self.strategy.policy == "replay":
            self._kind = Staged(setup)
        else:
            self._kind = Restarted(setup) if stages else Replicated(setup, self.strategy, comm)
        self._seed, self._state, self._folder, self._step = seed, self._kind.state, self._kind.folder, self._kind.step
        self.rank = self._kind.rank
        self._hook = optimizer.register_step_pre_hook(self._step.before_update)
        if self.rank == 0:
            print(f"ftcomm: strategy {self.strategy.name}: {self.reason}", file=sys.stderr, flush=True)

    @property
    def step_number(self) -> int:
        """Committed steps."""
        return self.progress.step

    @property
    def committed(self) -> bool:
        """Whether the last ``with engine.step():`` is a part of the run; if not, the loop gives its batch again.

        After an exception that the loop has caught it is not known yet, and so it isn't.
        """
        step = self._step
        return step.stepped and not (step.inside or step.undecided or step.dropped)

    @property
    def epoch(self) -> int:
        """Of the data, from 0."""
        return 0 if self._state.source is None else int(self._state.source.epoch)

    @property
    def extra(self) -> dict[str, Any]:
        """The dictionary that was given, with what came from the survivors or the checkpoint."""
        return self._state.extra

    @property
    def progress(self) -> Progress:
        """Steps, replacements and what was done again so far, the same on all ranks."""
        return self._state.progress

    def steps(self, loader: Iterable[Any], epochs: int = 1, *, bar: bool | None = None) -> Iterator[tuple[int, Any]]:
        """Steps and their batches until ``epochs`` epochs are over, counted from the begin of the run.

        Goes on where the newest checkpoint, or the survivors, are. Gives a step again that was dropped. What it does with the
        loader is in ``docs/data.md``. Collective: each rank goes through the same steps.

        Args:
            bar: a progress bar, by tqdm, of the lowest rank. None: if stderr is a terminal and tqdm is installed.
        """
        if self._state.source is not None:
            raise ConfigError(
                "engine.steps() was called before. Give it the number of epochs: engine.steps(loader, epochs=10)."
            )
        shown, over = Bar(bar), False
        source = self._state.source = self._kind.source(loader)
        try:
            with self._kind.around():
                yield from self._steps(epochs, shown)
            over = True
        except GeneratorExit:  # the script has ended the loop
            over = True
            self._warn_of_a_dropped_end()
            self._warn_of_what_no_checkpoint_has()
            raise
        finally:
            shown.close()
            source.close()
            self._hook.remove()
            try:
                if self._folder is not None:
                    self._folder.close()
            finally:  # also if the last checkpoint could not be written
                if over:  # who leaves in the loop keeps it: the signal may still be on its way
                    preempt.uninstall()
        if self.rank == min(self._kind.alive):
            print(f"ftcomm: {self.progress.words()}", file=sys.stderr, flush=True)

    def _warn_of_a_dropped_end(self) -> None:
        if self._step.stepped and self._step.dropped:
            warnings.warn(
                f"The loop was left after step {self.progress.step}, which was dropped, as somebody died in it: it is no part of "
                "the run. To end the loop after a step: `if engine.committed and ...: break`.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _warn_of_what_no_checkpoint_has(self) -> None:
        """None is written here: all ranks have a part in it, and others may not have left the loop, or at another step."""
        if self._folder is None or self.rank != min(self._kind.alive):
            return
        done = self.progress.step + self.committed  # the loop counts a step when it asks for the next one
        self._folder.wait()
        saved = self._folder.steps()
        if done > max(saved, default=0):
            newest = f"the newest is of step {saved[-1]}" if saved else "there is none"
            warnings.warn(
                f"The loop was left after {done} steps, before its end, and no checkpoint was written then: {newest}. To keep "
                'all of them leave it when one has been written (docs/engine.md, "Checkpoints"), or let it come to its end.',
                RuntimeWarning,
                stacklevel=3,
            )

    def _steps(self, epochs: int, bar: Bar) -> Iterator[tuple[int, Any]]:
        kind = self._kind
        kind.resume()
        while True:
            kind.meet(epochs)
            share = self._draw(epochs)
            if share is None:
                break
            kind.offer(share)
            if self._seed is not None:  # here, and not in step(): the body may draw before it
                reseed(self._seed, self.progress.step, self.rank)
            yield self.progress.step, share.batch
            if not self._step.stepped:
                raise ConfigError("The loop's body has to be inside `with engine.step():`.")
            contributed = kind.settle()
            if contributed is None:
                continue
            source: Any = self._state.source
            source.commit(contributed)
            self.progress.step += 1
            self.progress.lossy += bool({*kind.alive} - contributed)
            kind.committed()
            if self.rank == min(kind.alive):
                bar.show(self.progress, source, epochs)
        kind.finish()

    def step(self) -> AbstractContextManager[None]:
        """A context manager around forward pass, backward pass and update: all or nothing on every survivor."""
        return self._step

    def _draw(self, epochs: int) -> Any:
        source: Any = self._state.source
        while source.epoch < epochs:
            if (share := source.draw(self._kind.alive)) is not None:
                return share
            source.next_epoch()
        return None
