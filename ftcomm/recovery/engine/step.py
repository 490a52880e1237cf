"""One step as all or nothing: is it committed, or dropped?"""

from __future__ import annotations

import time
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ftcomm.errors import ConfigError, PeerFailure
from ftcomm.recovery.engine.buffers import share_buffers
from ftcomm.recovery.engine.gradients import Gradients
from ftcomm.recovery.engine.restorable import Restorable
from ftcomm.recovery.engine.schedules import Schedules
from ftcomm.recovery.strategies import Strategy
from ftcomm.recovery.strategies.checkpoint import once_more
from ftcomm.torch import join
from ftcomm.torch.shards import local

if TYPE_CHECKING:  # importing FSDP2 takes longer than many a recovery
    from ftcomm.recovery.engine.sharded import ShardedGradients

__all__ = ["Step"]


class _Dropped(BaseException):
    """Leaves the body of ``with engine.step():``, which takes it. No ``Exception``: the script's own handlers are not for it."""


class Step:
    """The context manager around forward pass, backward pass and update of one batch after another.

    Args:
        model: a DistributedDataParallel or sharded, or with ``gradients`` None a module that one rank has alone.
        gradients: of the model.
        restorable: what is put back when a step is dropped.
        strategy: decides whether it is.
        schedules: the script leaves them alone between a dropped step and its repetition.
        checkpoints: there is a folder for them.

    Attributes:
        alive: job ranks that began the step.
        contributed: job ranks whose gradients are in it, the same on all.
        missing: job ranks that the step was dropped for.
        stepped: the batch has had its step.
        inside: in the body.
        undecided: an exception has left the body before it was known whether the step is to be committed.
        dropped: it was not committed.
        undo_seconds: that putting the last dropped one back has taken.
    """

    def __init__(
        self,
        model: Any,
        gradients: Gradients | ShardedGradients | None,
        restorable: Restorable,
        strategy: Strategy,
        schedules: Schedules,
        checkpoints: bool,
    ) -> None:
        self._model, self._gradients, self._restorable, self._strategy = model, gradients, restorable, strategy
        self._schedules, self._checkpoints = schedules, checkpoints
        self.alive: tuple[int, ...] = ()
        self.contributed: frozenset[int] = frozenset()
        self.missing: set[int] = set()
        self._warned, self.undo_seconds = False, 0.0
        self.inside = self.undecided = self.dropped = self._settled = False
        self.stepped = True  # before the first batch

    def offer(self, alive: tuple[int, ...], weight: float) -> None:
        """The next batch is about to be given out. ``weight``: of this rank's gradients, 1 if all have as many samples."""
        self.alive, self.stepped = alive, False
        if self._gradients is not None:
            self._gradients.begin(weight)

    def __enter__(self) -> None:
        if self.inside:
            raise ConfigError("engine.step() is inside another one.")
        if self.stepped:
            raise ConfigError(
                "Each batch of engine.steps() has one engine.step(): with two, the first one's update could not be undone when "
                "the second is dropped."
            )
        self._schedules.check(last=True)
        self.inside, self._settled, self.dropped, self.stepped, self.missing = True, False, False, True, set()
        self.contributed = frozenset()
        self._restorable.save()
        if self._gradients is not None:
            self._gradients.inside = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return self._leave(error)
        finally:
            if self._gradients is not None:
                self._gradients.inside = False

    def _leave(self, error: BaseException | None) -> bool:
        try:
            if error is None and not self._settled:
                self._settle()  # no update was made, for instance as the scaler has skipped it
                self._warn_of_left_gradients()
        except _Dropped as dropped:
            error = dropped
        finally:
            self.inside = False
        if error is None:
            return False
        if not isinstance(error, _Dropped) and (self._settled or not self._of_a_death(error)):
            self.undecided = not self._settled
            return False
        self._put_back(raised=not isinstance(error, _Dropped))
        return True

    def _put_back(self, raised: bool) -> None:
        begin = time.monotonic()
        if self._gradients is not None:
            self._gradients.drop(raised)
        self._restorable.restore()
        self._schedules.keep()
        self.dropped, self.undo_seconds = True, time.monotonic() - begin

    def decide(self) -> None:
        """Collective, after the body: an exception has left it, and the loop has caught it. A step without an update, then.

        Not before: who ends by the exception must not let the others wait.
        """
        if not self.undecided:
            return
        if self._gradients is not None and not self._gradients.goes_on():
            raise ConfigError(
                "An exception has left engine.step() in the middle of the backward pass, and the loop has caught it: the "
                "averages of this step are not finished, and DistributedDataParallel can't begin the next ones. Let it end the "
                "rank, or catch what follows backward() only."
            )
        self.undecided = False
        try:
            self._settle()
            self._warn_of_left_gradients()
        except _Dropped:
            self._put_back(raised=False)

    def _warn_of_left_gradients(self) -> None:
        """Are they to be added to the next step's? That would not survive a death, or be in a checkpoint."""
        if self._warned or self._restorable.scaled:  # a scaler skips updates
            return
        parameters = self._model.parameters()
        if any(p.grad is not None and bool(local(p.grad).any()) for p in parameters):
            self._warned = True
            warnings.warn(
                "A step has made no update and leaves gradients. If the next step's are to be added to them: put all "
                "micro-batches of an update into one engine.step(), with no_sync() for all but the last, as these gradients are "
                "lost with a death. If the next step begins with zero_grad() all is well; call it at this step's end.",
                RuntimeWarning,
                stacklevel=4,
            )

    def between(self) -> None:
        """Before the next step, and before a replacement gets what there is: has the script done what can't be right?

        Raises:
            ConfigError: on all ranks that have dropped a step.
        """
        self._schedules.check()
        self._warn_of_short()

    def _warn_of_short(self) -> None:
        """Of what the script makes after the update nothing can be put back."""
        if self._gradients is None or not self._strategy.drops:
            return
        if missing := self._gradients.short({*self.alive}):
            who = ", ".join(map(str, sorted(missing)))
            warnings.warn(
                f"Rank {who} died, and a collective of the script's, after the update of a step or between steps, has ended "
                "without it: the result may lack its part, and what comes of it is another than in an undisturbed run. Before "
                "the update the step would have been dropped, and done again.",
                RuntimeWarning,
                stacklevel=6,
            )

    def before_update(self, _: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        """The optimizer's hook: an update begins only when all survivors know that it will be finished by all."""
        if not self.inside:
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

    # -- the decision --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Is the step to be committed? Outcomes of operations are the same on all survivors, and so is this."""
        if self._gradients is None:
            self._settled, self.contributed = True, frozenset(self.alive)
            return
        found = self._gradients.contributors()
        self.contributed = found if found is not None else frozenset(self.alive)
        wanted = {*join.expected(self._model)} if self._strategy.waits else {*self.alive}
        missing = wanted - self.contributed
        if self._strategy.drops or self._strategy.ends:
            missing |= self._gradients.unanswered(wanted)
        self.end_without(missing)
        if self._strategy.drops and missing:
            self._drop(missing)
        if self._gradients.shares_buffers:
            self._share_buffers(self._gradients.module)
        try:
            self._gradients.finish()
        except Exception as error:
            if not self._of_a_death(error):
                raise
            self._gradients.drop(raised=True)
            self._drop(set())
        self._settled = True

    def _share_buffers(self, module: Any) -> None:
        roots = sorted(self.contributed)
        while True:
            try:
                share_buffers(join.everybody(self._model), module, roots[0])
                return
            except PeerFailure as failure:
                self.end_without({*failure.ranks})
                if self._strategy.drops:
                    self._drop({*failure.ranks})
                del roots[0]

    def end_without(self, missing: set[int]) -> None:
        """
        Raises:
            PeerFailure: on all ranks alike; somebody is missing, and the strategy is to end then.
        """
        if not self._strategy.ends or not missing:
            return
        who = ", ".join(map(str, sorted(missing)))
        raise PeerFailure(
            f"Rank {who} is gone, and with strategy {self._strategy.name!r} all end. {once_more(self._checkpoints)}",
            ranks=sorted(missing),
            operation="engine step",
            epoch=join.everybody(self._model).job.epoch,
        )

    def _drop(self, missing: set[int]) -> None:
        self.missing = missing
        raise _Dropped

    def _of_a_death(self, error: BaseException) -> bool:
        """An operation of the script failed, on all ranks, as somebody died in it."""
        cause = error if isinstance(error, PeerFailure) else error.__cause__
        return self._strategy.policy == "lossy" and isinstance(cause, PeerFailure)
