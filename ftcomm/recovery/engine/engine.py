"""The engine: a training loop that goes on, exactly."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftcomm.errors import ConfigError, PeerFailure
from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.recovery.data import make_source
from ftcomm.recovery.engine.gradients import Gradients
from ftcomm.recovery.engine.progress import Progress
from ftcomm.recovery.engine.replicas import check_replicas
from ftcomm.recovery.engine.saved import pack, unpack
from ftcomm.recovery.engine.step import Restorable, StepDropped, reseed
from ftcomm.recovery.strategies import Facts, choose
from ftcomm.torch import join, reducer
from ftcomm.torch.groups import backend_of, communicator, job_of

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
        if checkpoint_every < 1 or patience <= 0:
            raise ConfigError(f"checkpoint_every={checkpoint_every} and patience={patience} must be above 0.")
        self.model, self.optimizer, self.extra = model, optimizer, dict(extra or {})
        self._seed, self._patience, self._keep_batch, self._every = seed, patience, keep_batch, checkpoint_every
        self._schedulers = (
            [] if scheduler is None else list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
        )
        self._scaler = scaler
        self._progress = Progress()
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._gradients: Gradients | None = None
        self._sync_buffers = False
        self.rank = 0
        self._slots: tuple[int, ...] = (0,)
        policy = None
        if dist.is_initialized():
            comm = communicator(getattr(model, "process_group", None))
            self._job = job_of(backend_of(getattr(model, "process_group", None)))
            self.rank, self._slots, policy = self._job.rank, tuple(comm.slots), comm.policy
        replicas = isinstance(model, DistributedDataParallel)
        if not self._alone:
            self._check_model(replicas)
        facts = Facts(
            len(self._slots),
            policy,
            replicas,
            int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0,
            checkpoint_dir is not None,
        )
        self.strategy, self.reason = choose(facts, strategy)
        if not self._alone:
            self._gradients = Gradients(model)
            # Every rank gets rank 0's buffers before the update, and not, as DDP has it, at the next forward pass: then they are
            # equal at each step's end, and no death can take the only ones along.
            self._sync_buffers, model.broadcast_buffers = model.broadcast_buffers, False
        module = model.module if replicas else model
        self._restorable = Restorable(module, [optimizer], self._schedulers, scaler)
        self._folder = None if checkpoint_dir is None else CheckpointFolder(checkpoint_dir, keep)
        self._hook = optimizer.register_step_pre_hook(self._before_update)
        self._source: Any = None
        self._alive: tuple[int, ...] = self._slots
        self._inside = self._settled = self._dropped = self._stepped = False
        self._contributed: frozenset[int] = frozenset()
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
        return self._progress.step

    @property
    def committed(self) -> bool:
        """Whether the last ``with engine.step():`` is a part of the run; if not, the loop gives its batch again."""
        return self._stepped and not self._inside and not self._dropped

    @property
    def epoch(self) -> int:
        """Of the data, from 0."""
        return 0 if self._source is None else int(self._source.epoch)

    @property
    def progress(self) -> Progress:
        """Steps, replacements and what was done again so far, the same on all ranks."""
        return self._progress

    # -- the loop ------------------------------------------------------------------------------------------------

    def steps(self, loader: Iterable[Any], epochs: int = 1) -> Iterator[tuple[int, Any]]:
        """Steps and their batches until ``epochs`` epochs are over, counted from the begin of the run.

        Goes on where the newest checkpoint, or the survivors, are. Gives a step again that was dropped. What it does with the
        loader is in ``docs/data.md``. Collective: each rank goes through the same steps.
        """
        if self._source is not None:
            raise ConfigError(
                "engine.steps() was called before. Give it the number of epochs: engine.steps(loader, epochs=10)."
            )
        source = self._source = make_source(
            loader, self.rank, len(self._slots), keep_batch=self._keep_batch, seed=self._seed
        )
        try:
            self._resume()
            while True:
                self._meet()
                share = self._draw(epochs)
                if share is None:
                    break
                if self._gradients is not None:
                    self._gradients.begin(share.samples * len(self._alive) / share.total)
                self._stepped = False
                if self._seed is not None:  # here, and not in step(): the body may draw before it
                    reseed(self._seed, self._progress.step, self.rank)
                yield self._progress.step, share.batch
                if not self._stepped:
                    raise ConfigError("The loop's body has to be inside `with engine.step():`.")
                self._after_step()
            if self._folder is not None:
                self._save(wait=True)
        finally:
            source.close()
            self._hook.remove()
            if self._folder is not None:
                self._folder.close()
        if self.rank == min(self._alive):
            print(f"ftcomm: {self._progress.words()}", file=sys.stderr, flush=True)

    def step(self) -> _Step:
        """A context manager around forward pass, backward pass and update: all or nothing on every survivor."""
        return _Step(self)

    def _draw(self, epochs: int) -> Any:
        while self._source.epoch < epochs:
            if (share := self._source.draw(self._alive)) is not None:
                return share
            self._source.next_epoch()
        return None

    def _after_step(self) -> None:
        if self._dropped:
            self._progress.dropped += 1
            if not self._alone:
                join.set_step(self.model, self._progress.step)
            return
        self._source.commit(self._contributed)
        self._progress.step += 1
        self._progress.lossy += bool(set(self._alive) - self._contributed)
        if self._folder is not None and self._progress.step % self._every == 0:
            self._save(wait=False)

    # -- one step ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._inside:
            raise ConfigError("engine.step() is inside another one.")
        if self._source is None or self._stepped:
            raise ConfigError(
                "Each batch of engine.steps() has one engine.step(): with two, the first one's update could not be undone when "
                "the second is dropped."
            )
        self._inside, self._settled, self._dropped, self._stepped = True, False, False, True
        self._restorable.save()

    def _end_step(self, error: BaseException | None) -> bool:
        """Whether the exception, if there is one, was taken."""
        try:
            if error is None and not self._settled:
                self._settle()  # no update was made, for instance as the scaler has skipped it
        except StepDropped as dropped:
            error = dropped
        finally:
            self._inside = False
        if error is None:
            return False
        if not isinstance(error, StepDropped) and (self._settled or not self._of_a_death(error)):
            return False
        self._restorable.restore()
        if not isinstance(error, StepDropped):
            self._new_reducer()  # it may be in the middle of a backward pass, on all ranks
        self._dropped = True
        return True

    def _new_reducer(self) -> None:
        if self._gradients is not None:
            reducer.renew(self.model)
            self._gradients.look_at_buckets()

    def _of_a_death(self, error: BaseException) -> bool:
        """An operation of the script failed, on all ranks, as somebody died in it."""
        cause = error if isinstance(error, PeerFailure) else error.__cause__
        return self.strategy.policy == "lossy" and isinstance(cause, PeerFailure)

    def _before_update(self, _: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        if not self._inside:
            raise ConfigError("optimizer.step() was called outside of `with engine.step():`.")
        if self._settled:
            raise ConfigError(
                "The optimizer makes a second update in one engine.step(). Put each update into a step of its own: "
                "only one can be all or nothing."
            )
        if any(callable(value) for value in (*args[1:], *more.values())):
            raise ConfigError(
                "optimizer.step() was given a closure: its gradients would come after the decision that the update may begin. "
                "Call backward() before optimizer.step(), with an optimizer that needs no closure."
            )
        self._settle()
        if self._gradients is not None and not self._gradients.averaged:
            raise ConfigError(
                "No gradients were averaged in this engine.step(), and an update would make the ranks differ. All micro-batches "
                "of an update belong into one engine.step(), and the last backward() of them out of no_sync()."
            )

    def _settle(self) -> None:
        """Is the step to be committed? Outcomes of operations are the same on all survivors, and so is this."""
        if self._gradients is None:
            self._settled, self._contributed = True, frozenset(self._alive)
            return
        found = self._gradients.contributors()
        self._contributed = found if found is not None else frozenset(self._alive)
        wanted = {*join.expected(self.model)} if self.strategy.waits else {*self._alive}
        missing = wanted - self._contributed
        if self.strategy.drops and self.model.find_unused_parameters:
            # DDP's question which parameters were used comes after the gradients, and has no outcome to look at. Who takes part in
            # an operation after it has answered.
            missing = wanted - {*join.everybody(self.model).all_reduce(torch.zeros(1), "max").contributors} | missing
        if self.strategy.drops and missing:
            self._drop(missing)
        if self._sync_buffers:
            self._share_buffers()
        try:
            self._gradients.learn_buckets()
        except Exception as error:
            if not self._of_a_death(error):
                raise
            self._new_reducer()
            self._drop(set())
        self._settled = True

    def _drop(self, missing: set[int]) -> None:
        self._job.emit("step-dropped", step=self._progress.step, missing=sorted(missing))
        raise StepDropped

    def _share_buffers(self) -> None:
        buffers = [buffer for buffer in self.model.module.buffers() if buffer.numel()]
        if not buffers:
            return
        flat = torch.cat([buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
        everybody, comes = join.everybody(self.model), sorted(self._contributed)
        while True:
            try:
                everybody.broadcast(flat, root=comes[0])
                break
            except PeerFailure as failure:  # the root has died with them, and no survivor has all
                if self.strategy.drops:
                    self._drop({*failure.ranks})
                del comes[0]
        at = 0
        with torch.no_grad():
            for buffer in buffers:
                size = buffer.numel() * buffer.element_size()
                buffer.copy_(flat[at : at + size].clone().view(buffer.dtype).reshape(buffer.shape))
                at += size

    # -- who is there --------------------------------------------------------------------------------------------

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"engine": self._progress, "data": self._source}
        state.update({f"scheduler {n}": scheduler for n, scheduler in enumerate(self._schedulers)})
        if self._scaler is not None:
            state["scaler"] = self._scaler
        return {**state, **{f"extra {name}": value for name, value in self.extra.items()}}

    def _take(self, state: dict[str, Any]) -> None:
        self.extra = {name.removeprefix("extra "): value for name, value in state.items() if name.startswith("extra ")}

    def _meet(self) -> None:
        if self._alone:
            return
        here = join.enter(self.model, self.optimizer, self._state, self._patience if self.strategy.waits else None)
        self._alive = here.alive
        self._take(here.extra)
        if here.joined:
            assert self._gradients is not None
            self._gradients.look_at_buckets()
            self._progress.joined += len(here.joined)
            check_replicas(join.everybody(self.model), self.model, [self.optimizer])

    def _resume(self) -> None:
        """From the newest checkpoint that a rank can read. A replacement gets the survivors' state instead."""
        if not self._alone and self._job.joining:
            return
        found = self._folder.newest() if self._folder is not None else None
        step, newest = (-1 if found is None else found[0]), -1 if found is None else found[0]
        if not self._alone:
            told = torch.tensor([step])
            join.everybody(self.model).all_reduce(told, "max")
            newest = int(told)
        if newest < 0:
            return
        if found is not None and step == newest:
            self._take(unpack(found[1], self._restorable.module, self.optimizer, self._state))
            if not self._alone:
                reducer.set_layout(self.model, found[1]["buckets"])
        if not self._alone:
            self._take(join.share(self.model, self.optimizer, self._state, step == newest).extra)
            join.set_step(self.model, self._progress.step)
        if self.rank == 0:
            print(f"ftcomm: goes on from the checkpoint of step {self._progress.step}", file=sys.stderr, flush=True)

    def _save(self, wait: bool) -> None:
        assert self._folder is not None
        if self.rank == min(self._alive):
            buckets = None if self._alone else reducer.layout_of(self.model)
            state = pack(self._restorable.module, self.optimizer, self._state, buckets)
            self._folder.save(self._progress.step, state, wait)


class _Step:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._engine._begin_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._engine._end_step(error)
