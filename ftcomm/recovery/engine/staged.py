"""Ranks under the policy replay, such as stages of a pipeline: who dies is replaced and does its steps again out of the logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ftcomm.communicator import Communicator
from ftcomm.errors import ConfigError
from ftcomm.job import begin_step
from ftcomm.recovery.data import Share
from ftcomm.recovery.determinism import deterministic
from ftcomm.recovery.engine.kind import Setup
from ftcomm.recovery.engine.logged_groups import LoggedGroups
from ftcomm.recovery.engine.logged_step import LoggedStep
from ftcomm.recovery.engine.stage import Stage
from ftcomm.recovery.engine.stopping import Stopping
from ftcomm.recovery.engine.twins import Twins
from ftcomm.torch.groups import communicator
from ftcomm.torch.modules import ddps_in, unwrapped
from ftcomm.torch.optimizers import parameters_of

__all__ = ["Staged"]


class Staged(Stage):
    """One rank's.

    A replacement runs the first step as the others did, which belongs to what each process does again (see
    ``Communicator.resume``), and then what came after its checkpoint.

    Raises:
        ConfigError, Unsupported: the model, ``keep`` or ``seed`` can't be used so.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, communicator())
        self.step = LoggedStep(self._updates)
        self._parallel: Any = None
        if setup.schedule is not None:
            from ftcomm.recovery.engine.parallel import ParallelReplay  # which imports torch's pipelines: half a second

            self._parallel = ParallelReplay(setup.schedule, self._model, self._everybody)
        self._groups: LoggedGroups | None = None  # with checkpoints
        self._twins: Twins | None = None
        self._used: dict[int, tuple[int, int]] = {}  # gradients of the last update
        group = self._replicas
        if self.folder is not None and group is not None and group.size > 1 and _notes_are_cheap(group):
            self._twins = Twins(group, self.state, unwrapped(self._model), setup.optimizer)
            self._hook = setup.optimizer.register_step_post_hook(self._updated)
        self._stopping: Stopping | None = None

    def _check(self, setup: Setup) -> None:
        if setup.checkpoint_dir is None:
            return
        if any(ddp.static_graph for ddp in ddps_in(setup.model)):
            raise ConfigError(
                "static_graph=True is not supported with checkpoints under the policy 'replay': DistributedDataParallel orders "
                "its buckets in a later iteration then, and a replacement would do so when the others do not. Leave it out, or "
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

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        if self.folder is not None:
            self._stopping = Stopping(self.rank, self._everybody.job.world_size)
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

    def meet(self, epochs: int) -> None:
        """Nobody is ever missing: whoever sends or receives something waits for the replacement. But all may be told to leave."""
        step = self.state.progress.step
        if not self._first and self._stopping is not None and self._stopping.before(step):
            if self._saved != step and self._leaves_gradients():
                self._stopping.postpone()  # of the script, and the same on all: it updates in some steps only
            else:
                self._last_words()
        begin_step(self._everybody.job, step)

    def offer(self, share: Share) -> None:
        self._used.clear()  # only an update of this very step can have used them: others of their names may come
        self._everybody.log_position(self.state.progress.step)
        super().offer(share)

    def committed(self) -> None:
        super().committed()
        if self.folder is not None:
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
        own = {id(parameter) for parameter in parameters_of(self._setup.optimizer)}  # others' gradients stay, and grow
        grads = [parameter.grad if id(parameter) in own else None for parameter in self._model.parameters()]
        self._used = {n: (id(grad), grad._version) for n, grad in enumerate(grads) if grad is not None}

    # -- checkpoints ---------------------------------------------------------------------------------------------

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

    def _counts(self, step: int) -> None:
        # By the log, which a process before this one may have written: so this rank has it, whatever becomes of a second try.
        assert self._groups is not None
        self._groups.commit(step)


def _notes_are_cheap(group: Communicator) -> bool:
    """And possible. Where a record has to survive its host, each would wait for the disk."""
    options = group.job.options
    return options.log == "all" and options.durability == "process"
