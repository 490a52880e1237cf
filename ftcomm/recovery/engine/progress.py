"""How far the run is, and what failures have cost it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Progress"]


@dataclass
class Progress:
    """The same on all ranks; a replacement gets it with the rest of the state, and it is in each checkpoint.

    Attributes:
        step: committed steps.
        dropped: steps that were dropped and done again.
        joined: replacements that came in.
        lossy: steps that were committed without somebody's gradients.
    """

    step: int = 0
    dropped: int = 0
    joined: int = 0
    lossy: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in fields(self):
            setattr(self, field.name, int(state[field.name]))

    def words(self) -> str:
        counts = {
            "step": self.step,
            "replacement": self.joined,
            "step done again": self.dropped,
            "step without somebody's gradients": self.lossy,
        }
        return ", ".join(_counted(n, what) for what, n in counts.items() if n or what == "step")


def _counted(n: int, what: str) -> str:
    noun, space, rest = what.partition(" ")
    return f"{n} {noun}{'s' * (n != 1)}{space}{rest}"
