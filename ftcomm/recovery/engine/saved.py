"""The state of a run: what a replacement gets and a checkpoint holds, and the way from and to the checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ftcomm.errors import ConfigError, PeerFailure, SystemFailure
from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.recovery.checkpoint_files.state import check_state
from ftcomm.recovery.engine.agreed import check_same
from ftcomm.recovery.engine.between_steps import BetweenSteps
from ftcomm.recovery.engine.gathered import Gathered
from ftcomm.recovery.engine.modes import Modes
from ftcomm.recovery.engine.progress import Progress
from ftcomm.torch import join, reducer
from ftcomm.torch.modules import unwrapped
from ftcomm.torch.optimizers import load_optimizer, same_types
from ftcomm.torch.point import point_of
from ftcomm.torch.shards import Shards, sharded

__all__ = ["RunState"]

_PLAIN = "plain"  # in a checkpoint's state: names of what is a value of extra, and no object's state


class RunState:
    """Everything that is equal on all ranks at the begin of a step.

    Attributes:
        progress: of the run.
        gradients: which parameters have one.
        modes: of the model.
        gathered: of a sharded model: all ranks have to save() together; None: one of them does.
        source: of the batches, when there is one.
        extra: the script's own dictionary, with what it has put there, or what came from the survivors or a checkpoint.
    """

    def __init__(self, model: Any, alone: bool, optimizer: Any, schedulers: list[Any], scaler: Any, extra: Any) -> None:
        self._model, self._alone, self._optimizer = model, alone, optimizer
        self._module = unwrapped(model)
        self._schedulers, self._scaler = schedulers, scaler
        self.gathered: Gathered | None = None
        if sharded(model) and alone:
            self.gathered = Gathered(model, optimizer, Shards(model, 1), 0, None)
        elif sharded(model):
            point = point_of(model)
            assert point.shards is not None
            self.gathered = Gathered(model, optimizer, point.shards, point.job.rank, point.group)
        self.progress = Progress()
        self.gradients = BetweenSteps(self._module, optimizer)
        self.modes = Modes(model, self._module)
        self.source: Any = None
        self.extra: dict[str, Any] = {} if extra is None else extra

    def named(self) -> dict[str, Any]:
        """All but model and optimizer: objects with ``state_dict`` and ``load_state_dict``, and plain values."""
        state: dict[str, Any] = {
            "engine": self.progress,
            "data": self.source,
            "gradients": self.gradients,
            "modes": self.modes,
        }
        state.update({f"scheduler {n}": scheduler for n, scheduler in enumerate(self._schedulers)})
        if self._scaler is not None:
            state["scaler"] = self._scaler
        return {**state, **{f"extra {name}": value for name, value in self.extra.items()}}

    def take(self, state: dict[str, Any]) -> None:
        """What came for :meth:`named`; the objects have loaded theirs."""
        extra = {name.removeprefix("extra "): value for name, value in state.items() if name.startswith("extra ")}
        self.extra.clear()  # and not another one: the script goes on writing to its own
        self.extra.update(extra)

    def save(self, folder: CheckpointFolder, wait: bool, alive: tuple[int, ...], *, prune: bool = True) -> None:
        """``{"model": state_dict, "optimizer": state_dict, "state": {name: state_dict or value}, "buckets": DDP's}``

        Raises:
            ConfigError, SystemFailure, PeerFailure: it could not be written, or gathered, with ``wait``. Else that is a
                warning: training goes on, and so do the older checkpoints.
        """
        try:
            parts = self._parts(alive)
        except PeerFailure as failure:
            if wait:
                raise
            warnings.warn(f"Training goes on without this checkpoint: {failure}", RuntimeWarning, stacklevel=2)
            return
        if parts is None:
            return  # another rank writes it
        buckets = None if self._alone or self.gathered is not None else reducer.layout_of(self._model)
        state = {**parts, "state": self.small(), "buckets": buckets}
        try:
            folder.wait()
        except SystemFailure as error:
            warnings.warn(
                f"Training goes on without the checkpoint before this one: {error}", RuntimeWarning, stacklevel=2
            )
        try:
            folder.save(self.progress.step, state, wait, prune=prune)
        except (ConfigError, SystemFailure) as error:  # the first: of what the script has put into extra since
            if wait:
                raise
            warnings.warn(f"Training goes on without this checkpoint: {error}", RuntimeWarning, stacklevel=2)

    def small(self) -> dict[str, Any]:
        """Of :meth:`named`: what :meth:`load` finds under "state"."""
        named = self.named()
        small = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in named.items()}
        if plain := [name for name in named if name.startswith("extra ") and not hasattr(named[name], "state_dict")]:
            small[_PLAIN] = plain
        return small

    def _parts(self, alive: tuple[int, ...]) -> dict[str, Any] | None:
        if self.gathered is not None:
            return self.gathered.gather(alive)
        return {"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}

    def resume(self, folder: CheckpointFolder | None) -> bool:
        """Collective: from the newest checkpoint that a rank can read; the others get it from those. False: there is none.

        Raises:
            ConfigError: no checkpoint could hold this state.
            Mismatch: on all ranks; some have read another one than others, of the same step.
        """
        if folder is not None:
            check_state(
                {"state": self.small()}
            )  # now, on all ranks, and not when the first one is due, on who writes it
        found = folder.newest() if folder is not None else None
        step = newest = -1 if found is None else found[0]
        if not self._alone:
            told = torch.tensor([step])
            join.everybody(self._model).all_reduce(told, "max")
            newest = int(told)
        if newest < 0:
            return False
        if not self._alone:
            have = found[1] if found is not None and step == newest else None
            check_same(join.everybody(self._model), newest, have)
        if folder is not None and found is not None and step == newest:
            self.load(found[1], folder)
        if not self._alone:
            self.take(join.share(self._model, self._optimizer, self.named(), step == newest).extra)
            join.set_step(self._model, self.progress.step)
        return True

    def load(self, saved: dict[str, Any], folder: CheckpointFolder) -> None:
        """Takes what :meth:`save` has written. ``folder``: where it is from."""
        named = self.named()
        state = {
            "gradients": {"with": []},
            "modes": self.modes.state_dict(),
            **saved["state"],
        }  # files of before these were kept
        # What the script has put into extra during the run comes back; an object has to be there, to load its own.
        named.update({name: None for name in state.pop(_PLAIN, ()) if name not in named})
        if {*state} != {*named}:
            odd = ", ".join(sorted({*state} ^ {*named}))
            raise ConfigError(
                f"The checkpoint and this script do not have the same state ({odd}): it is of another run, or an "
                "object was put into extra during that one: put it there before engine.steps()."
            )
        if self.gathered is not None:
            self.gathered.load(saved)
        else:
            alike = same_types(saved["model"], self._module.state_dict())
            self._module.load_state_dict(saved["model"])
            load_optimizer(self._optimizer, saved["optimizer"], alike)
        self._load_data(state.pop("data"), saved["state"]["engine"]["step"], folder)
        for name, value in state.items():
            if hasattr(named[name], "load_state_dict"):
                named[name].load_state_dict(value)
            else:
                named[name] = value
        self.take(named)
        if not self._alone and self.gathered is None:
            reducer.set_layout(self._model, saved["buckets"])

    def _load_data(self, state: dict[str, Any], step: int, folder: CheckpointFolder) -> None:
        try:
            self.source.load_state_dict(state)
        except ConfigError as error:
            raise ConfigError(
                f"The run can't go on from the checkpoint of step {step} in {folder.path}. {error} Or give another "
                "checkpoint_dir, and it begins with the first step: torch.load(file, weights_only=True)['model'] has the weights."
            ) from error
