"""Checkpoint and restart, the last resort: a failure ends the job, and its next start goes on from the newest checkpoint."""

from __future__ import annotations

from ftcomm.recovery.strategies.base import Facts, Strategy


class _Checkpoint(Strategy):
    def misfit(self, facts: Facts) -> str | None:
        if not facts.checkpoints:
            return "there is no folder for checkpoints. Give the engine checkpoint_dir=."
        return None


CHECKPOINT = _Checkpoint("checkpoint", policy=None, drops=False, waits=False, ends=True)
