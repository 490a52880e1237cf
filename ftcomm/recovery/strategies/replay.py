"""Replay from logs: who dies is replaced, does its steps again from its checkpoint out of the logs, and goes on with the others.

SWIFT, section 5: survivors keep their state, and no step is dropped. Messages and results of collectives are in the logs of the
communication layer, which feeds the replacement.
"""

from __future__ import annotations

from ftcomm.recovery.strategies.base import Facts, Strategy


class Replay(Strategy):
    def misfit(self, facts: Facts) -> str | None:
        if facts.policy == "replay":
            return None
        return (
            f"it needs a process group with policy 'replay', whose messages are logged, and here it is {facts.policy!r}. "
            "Start with ftrun --policy replay (docs/pipelines.md)."
        )


REPLAY = Replay("replay", policy="replay", drops=False, waits=False)
