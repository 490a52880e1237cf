"""What the launcher of this process does when a worker has died, by the variables that it has set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launcher", "launcher"]


@dataclass(frozen=True)
class Launcher:
    """Neither: it does nothing, or there is none.

    Attributes:
        replaces: it starts another process for the dead one, and the others go on.
        ends_all: it ends all others, and maybe starts all again.
    """

    replaces: bool = False
    ends_all: bool = False


def launcher(environment: Mapping[str, str]) -> Launcher:
    """ftrun's workers have torchrun's variables, and ``FTCOMM_INCARNATION`` as well, which nobody else sets in them."""
    restarts = _number(environment, "TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if "FTCOMM_INCARNATION" in environment:
        return Launcher(replaces=restarts)
    if "TORCHELASTIC_RUN_ID" not in environment:
        return Launcher()
    # Without restarts the agents of other nodes do not hear of it, and their workers go on.
    return Launcher(ends_all=restarts or _number(environment, "GROUP_WORLD_SIZE", 1) == 1)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else default
