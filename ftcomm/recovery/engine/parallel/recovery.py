"""Strategy ``parallel-replay``: steps that lie wholly in the log are done again by all ranks together (SWIFT, section 5.2).

SWIFT's survivors write a checkpoint, load the lost stage, compute, and load their checkpoint again. Here they keep their own
stage where it is: they get a copy of the lost one with each step's micro-batches, and compute in a thread, while their script
waits in a receive. Nothing of that is kept from step to step, so nothing of it can be out of date.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules

from ftcomm.communicator import Communicator
from ftcomm.errors import ConfigError
from ftcomm.recovery.engine.message import Packed, pack
from ftcomm.recovery.engine.parallel.ghost import Differing, Ghost
from ftcomm.recovery.engine.parallel.helpers import Helpers
from ftcomm.recovery.engine.parallel.logged import Ahead, Need, ahead_of
from ftcomm.recovery.engine.parallel.observe import Observer, obstacle
from ftcomm.recovery.engine.parallel.service import Service
from ftcomm.recovery.engine.parallel.trial import kind_of, trial
from ftcomm.recovery.engine.parallel.work import Done, Item

__all__ = ["ParallelReplay"]


class ParallelReplay:
    """One rank's part in it: it serves replacements, and if it is one itself, it is served until it has caught up.

    A replacement's schedule gets another ``step``: the first one is done as ever, and watched; those that then lie wholly in the
    log are ghosts; and the first that does not ends that.
    """

    def __init__(self, schedule: Any, model: nn.Module, comm: Communicator) -> None:
        if not isinstance(schedule, (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)):
            raise ConfigError(
                "schedule= takes a schedule of torch.distributed.pipelining, such as Schedule1F1B, "
                f"not {type(schedule).__name__}."
            )
        self._schedule, self._model, self._comm = schedule, model, comm
        self._replaying = self._by_itself = False
        self._loss_of: Any = None
        self._packed: Packed | None = None  # the module and that
        self._watched: Observer | None = None
        self._helpers: Helpers | None = None
        self._need: Need | None = None  # of the last step
        self._steps, self._micro_batches, self._began = 0, 0, 0.0

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Entered for the time of the loop."""
        self._replaying = ahead_of(self._comm).anything
        service = Service(self._comm._job, self._busy)
        if not self._replaying:
            try:
                yield
            finally:
                service.close()
            return
        self._real, self._own_step = self._schedule.step, "step" in vars(self._schedule)
        self._schedule.step = self._step
        try:
            if why := obstacle(self._schedule, self._model, self._comm):
                self._alone(why)
            else:
                self._helpers = Helpers(self._comm._job, self._schedule._n_microbatches)
            yield
        finally:
            self._caught_up()
            service.close()

    def _busy(self) -> bool:
        """Does steps again: has no time for others. Asked by the service's threads."""
        if self._by_itself and not ahead_of(self._comm).anything:
            self._by_itself = False
        return self._replaying or self._by_itself

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._replaying:
            return self._real(*args, **kwargs)
        before = ahead_of(self._comm)
        if self._watched is None:
            self._watched = Observer(self._schedule, self._comm)
            with self._watched.watching():
                found = self._real(*args, **kwargs)
            why = "autocast is on" if torch.is_autocast_enabled("cpu") else self._watched.obstacle
            if why:
                self._alone(why)
        elif self._can_be_ghost(before):
            if why := self._in_the_way():
                self._alone(why)
                return self._real(*args, **kwargs)
            found = self._ghost(*args, **kwargs)
        else:
            self._caught_up()
            return self._real(*args, **kwargs)
        self._need = ahead_of(self._comm).since(before)
        return found

    def _can_be_ghost(self, ahead: Ahead) -> bool:
        # The first step's need has the shapes in it that stages tell each other then: so the last ghost may be a real step.
        return (
            self._need is not None
            and ahead.holds(self._need)
            and self._schedule._has_backward
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )

    def _in_the_way(self) -> str | None:
        """Of a ghost, now: the script may have changed the module, or what watches it, since the last step."""
        assert self._watched is not None
        if why := obstacle(self._schedule, self._model, self._comm):
            return why
        self._loss_of = self._schedule._loss_fn if self._schedule._stage.is_last else None  # a ghost's is another one
        try:
            self._packed = pack((self._model, self._loss_of))
        except Exception as error:  # noqa: BLE001 - whatever pickle says of it
            return f"the module or the loss function cannot be pickled ({type(error).__name__}: {error})"
        kind = kind_of(self._packed)
        if kind == self._watched.kind:
            return None
        self._watched.kind = kind
        assert self._watched.item is not None
        return trial(self._packed, self._watched.item, self._watched.forms, self._comm)

    def _ghost(self, *args: Any, **kwargs: Any) -> Any:
        assert self._watched is not None
        self._began = self._began or time.time()
        ghost = Ghost(self._schedule, self._comm, self._watched.forms, self._watched.loss_form, self._compute)
        with ghost.instead():
            found = self._real(*args, **kwargs)
        self._steps += 1
        return found

    def _compute(self, items: Sequence[Item], differing: Differing) -> Iterator[Done]:
        assert self._helpers is not None
        self._micro_batches += len(items)
        assert self._packed is not None
        return self._helpers.compute(self._model, self._loss_of, items, self._packed, differing)

    def _alone(self, why: str) -> None:
        print(
            f"ftcomm: rank {self._comm.rank}: does its steps again alone (strategy replay): {why}.",
            file=sys.stderr,
            flush=True,
        )
        self._by_itself = True
        self._caught_up()

    def _caught_up(self) -> None:
        """From here on it computes its stage itself, and has time for others."""
        if not self._replaying:
            return
        self._replaying = False
        if self._own_step:  # the script has put another one there
            self._schedule.step = self._real
        else:
            del self._schedule.step
        helpers = self._helpers.all if self._helpers is not None else []
        if self._helpers is not None:
            self._helpers.close()
        if self._steps and not sys.is_finalizing():  # nobody listens then
            shares = {str(helper.rank): helper.micro_batches for helper in helpers}
            left_out = {str(helper.rank): helper.why for helper in helpers if helper.why}
            self._comm._job.emit(
                "parallel-replay",
                steps=self._steps,
                begin=self._began,
                micro_batches=self._micro_batches,
                helpers=shares,
                left_out=left_out,
            )
