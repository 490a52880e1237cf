"""The checkpoints of all process groups of a rank, as one: for replicated stages, and other layouts of several dimensions.

Each group has a log of its own, and marks a checkpoint in it by itself. A rank marks it in the other groups first, in the
order of their numbers, and in the default group last. So:

- A rank whose default group has the mark has it in all groups, and it goes on from there in all of them.
- Who dies in between has it in some groups, and not in the default group. It goes on from the one before, in all groups: a
  log keeps what belongs to the mark before the last that all ranks have.
- Nobody waits in a circle, as groups have the same number on all ranks.
- A group of one rank whose log is lost has nobody to ask for its marks, and nothing to hear from others: it begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftcomm.communicator import Communicator
from ftcomm.errors import ConfigError
from ftcomm.torch.groups import communicator, others_open

__all__ = ["LoggedGroups"]


class LoggedGroups:
    """Of a rank, as they are when the loop begins.

    Raises:
        ConfigError: not all that is said in them is logged.
    """

    def __init__(self) -> None:
        self._default, self._others = communicator(), _others()
        if self._others and self._default.job.options.log != "all":
            raise ConfigError(
                "Checkpoints of several process groups need log='all': with log groups, ranks go back together, and each of "
                "their process groups may have another newest checkpoint. Leave checkpoint_dir out, or log all messages."
            )

    def resume_from(self, load: Callable[[Any], Any]) -> tuple[Any, Any]:
        """As :meth:`Communicator.resume_from`, in all groups."""
        self._check()
        known = [(group.name, group.checkpoints()) for group in self._others if group.size > 1]

        def load_known(tag: Any) -> Any:
            """A mark that is the default group's oldest may have been given up in one that was marked once more."""
            if missing := [name for name, tags in known if tag not in tags]:
                raise ConfigError(f"the log of process group {', '.join(missing)} does not go back to it any more")
            return load(tag)

        tag, saved = self._default.resume_from(load_known)
        for group in self._others:
            try:
                group.resume(tag if group.size > 1 or tag in group.checkpoints() else None)
            except ConfigError as error:
                if tag is not None:
                    raise
                raise ConfigError(
                    f"No checkpoint of rank {self._default.rank} can be loaded, and the log of process group {group.name} does "
                    f"not go back to the begin: {error} Start again with a fresh log: the run goes on from the newest "
                    "checkpoint that all ranks have whole."
                ) from error
        return tag, saved

    def note(self, tag: str) -> None:
        """As :meth:`Communicator.note`, in all groups."""
        self._check()
        for group in (*self._others, self._default):
            group.note(tag)

    def notes(self) -> list[Any]:
        """Tags of those that all groups have, the newest first."""
        others = [group.notes() for group in self._others]
        return [tag for tag in self._default.notes() if all(tag in tags for tags in others)]

    def checkpoints(self) -> list[Any]:
        """As :meth:`Communicator.checkpoints`, of the default group."""
        return self._default.checkpoints()

    def resume_noted(self, tag: str) -> None:
        """As :meth:`Communicator.resume`, in all groups."""
        self._check()
        for group in (self._default, *self._others):
            group.resume(tag, noted=True)

    def commit(self, tag: int) -> None:
        """As :meth:`Communicator.commit_checkpoint`, in all groups. Collective. Errors are those of the members of one group."""
        self._check()
        for group in self._others:
            group.commit_checkpoint(tag)
        self._default.commit_checkpoint(tag)

    def _check(self) -> None:
        if made := sorted(self._default.job.made.values()):
            raise ConfigError(
                f"There are communicators that are no process groups ({', '.join(made)}), and checkpoints are of process groups "
                "only: a replacement would hear again in the others what was said before its checkpoint. Close them, use "
                "dist.new_group(), or leave checkpoint_dir out (a replacement does all steps again)."
            )
        now = _others()
        if [group.id for group in now] == [group.id for group in self._others]:
            return
        names = [group.name for group in now] or ["none"]
        raise ConfigError(
            "The process groups besides the default one are not those that there were when the loop began (now: "
            f"{', '.join(names)}), and checkpoints are of all of them. Make groups before engine.steps(), and destroy them "
            "after the loop."
        )


def _others() -> list[Communicator]:
    return sorted(others_open(), key=lambda group: group.id)
