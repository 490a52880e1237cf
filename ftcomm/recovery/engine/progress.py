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
        parts = [f"{self.step} steps"]
        parts += [f"{self.joined} replacements"] * bool(self.joined)
        parts += [f"{self.dropped} steps done again"] * bool(self.dropped)
        parts += [f"{self.lossy} steps without somebody's gradients"] * bool(self.lossy)
        return ", ".join(parts)
