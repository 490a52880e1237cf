"""Stages of a pipeline whose messages are in no log: a failure ends all, and the next start goes on from their checkpoints.

That is what is left under launchers that replace nobody, or all together (torchrun, mpirun). What a start finds is a checkpoint
that all stages have, so that no stage is ahead of another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch

from ftcomm.communicator import Communicator, communicator_id
from ftcomm.errors import ConfigError, PeerFailure, SystemFailure
from ftcomm.job import begin_step
from ftcomm.launch import preempt
from ftcomm.recovery.engine.kind import Setup
from ftcomm.recovery.engine.logged_step import LoggedStep
from ftcomm.recovery.engine.stage import Stage
from ftcomm.torch.groups import communicator

__all__ = ["Restarted"]


class Restarted(Stage):
    """One rank's.

    Each step begins with a small all-reduce of all ranks: SIGTERM to any of them is a notice to all, and where the policy lets
    replicas of a stage average without a dead one, no step comes after that. It costs little, as the stages of a pipeline have
    nothing to compute between two steps: the last backward pass ends in the first stage, where the next step begins.

    Raises:
        ConfigError, Unsupported: the model can't be used so.
    """

    step: _Step

    def __init__(self, setup: Setup) -> None:
        job = communicator().job
        if job.joining:
            raise ConfigError(
                "This process replaces a dead rank, and nobody has what its stage had: the others have ended, or will. Start "
                "with ftrun --policy replay, under which it does its steps again out of the logs, or without restarts."
            )
        everybody = Communicator.create(job, "stages", id=communicator_id(job.name, "stages"), policy="raise")
        super().__init__(setup, everybody)
        self.step = _Step(everybody, self.folder is not None)

    def resume(self) -> None:
        """The first step comes before the checkpoint."""

    def meet(self, epochs: int) -> None:
        step = self.state.progress.step
        # Gradients are left by the script, and the same on all: it updates in some steps only.
        stays = self._first or (self._saved != step and self._leaves_gradients())
        told = torch.tensor([int(preempt.requested()), int(stays)])
        with self._ending():
            self._everybody.all_reduce(told, "max")
        goes, stay = told.tolist()
        if goes and not stay:
            self._last_words()
        self._first = self._first and self.folder is not None
        begin_step(self._everybody.job, step)

    def _go_on(self) -> bool:
        with self._ending():
            saved = self._agree()
        if saved is None:
            return False
        self._load(saved)
        self._saved = self.state.progress.step
        if self.rank == 0:
            self._say(f"goes on from the checkpoint of step {self._saved}")
        return True

    def _save(self) -> SystemFailure | None:
        with self._ending():  # also of a death in the step before, which the policy let the replicas finish
            return super()._save()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except PeerFailure as failure:
            raise self.step.ended_by(failure) from failure

    def _counts(self, step: int) -> None:
        """It does, when all have written theirs: who starts next looks for the newest that all have."""


class _Step(LoggedStep):
    """A death in it is the end: says so."""

    def __init__(self, everybody: Communicator, checkpoints: bool) -> None:
        super().__init__()
        self._everybody, self._checkpoints = everybody, checkpoints

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        failure = error
        while failure is not None and not isinstance(failure, PeerFailure):
            failure = failure.__cause__  # torch puts what a stage's backward pass raises into an error of its own
        if failure is not None:
            raise self.ended_by(failure) from error

    def ended_by(self, failure: PeerFailure) -> PeerFailure:
        """The error for the script, with ranks of the job: the failure may be one of a smaller group."""
        ranks = tuple(sorted(self._everybody.failed()))
        who = f"Rank {', '.join(map(str, ranks))}" if ranks else "A rank"
        once_more = "the run goes on from the newest checkpoint that all stages have"
        if not self._checkpoints:
            once_more = "with a checkpoint_dir the run would go on, without one it begins with the first step"
        return PeerFailure(
            f"{who} is gone, and a pipeline can't go on without its stage. Start again: {once_more}.",
            ranks=ranks,
            evidence=failure.evidence,
            operation="engine step",
            epoch=failure.epoch,
        )
