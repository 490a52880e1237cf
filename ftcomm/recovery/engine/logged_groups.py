"""The checkpoints of all process groups of a rank, as one: for replicated stages, and other layouts of several dimensions.

Each group has a log of its own, and marks a checkpoint in it by itself. A rank marks it in the other groups first, in the
order in which they were made, and in the default group last. So:

- A rank whose default group has the mark has it in all groups, and it goes on from there in all of them.
- Who dies in between has it in some groups, and not in the default group. It goes on from the one before, in all groups: a
  log keeps what belongs to the mark before the last that all ranks have.
- Nobody waits in a circle: ranks make their groups in one order, as torch has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftcomm.errors import ConfigError
from ftcomm.torch.groups import communicator, others_open

__all__ = ["LoggedGroups"]


class LoggedGroups:
    """Of a rank, as they are when the loop begins.

    Raises:
        ConfigError: not all that is said in them is logged.
    """

    def __init__(self) -> None:
        self._default, self._others = communicator(), others_open()
        if self._others and self._default.job.options.log != "all":
            raise ConfigError(
                "Checkpoints of several process groups need log='all': with log groups, ranks go back together, and each of "
                "their process groups may have another newest checkpoint. Leave checkpoint_dir out, or log all messages."
            )

    def __len__(self) -> int:
        return 1 + len(self._others)

    def resume_from(self, load: Callable[[Any], Any]) -> tuple[Any, Any]:
        """As :meth:`Communicator.resume_from`, in all groups."""
        self._check()
        tag, saved = self._default.resume_from(load)
        for group in self._others:
            group.resume(tag)
        return tag, saved

    def commit(self, tag: int) -> None:
        """As :meth:`Communicator.commit_checkpoint`, in all groups. Collective."""
        self._check()
        for group in self._others:
            group.commit_checkpoint(tag)
        self._default.commit_checkpoint(tag)

    def _check(self) -> None:
        now = others_open()
        if [group.id for group in now] == [group.id for group in self._others]:
            return
        names = [group.name for group in now] or ["none"]
        raise ConfigError(
            "The process groups besides the default one are not those that there were when the loop began (now: "
            f"{', '.join(names)}), and checkpoints are of all of them. Make groups before engine.steps(), and destroy them "
            "after the loop."
        )
