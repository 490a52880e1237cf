"""Checkpoint and restart, the last resort: a failure ends the job, and its next start goes on from the newest checkpoint."""

from __future__ import annotations

from ftcomm.recovery.strategies.base import Facts, Strategy

__all__ = ["CHECKPOINT", "once_more"]


class _Checkpoint(Strategy):
    def misfit(self, facts: Facts) -> str | None:
        if not facts.checkpoints:
            return "there is no folder for checkpoints. Give the engine checkpoint_dir=."
        return None


CHECKPOINT = _Checkpoint("checkpoint", policy=None, drops=False, waits=False, ends=True)


def once_more(checkpoints: bool) -> str:
    """What the next start does, for an error that ends all. ``checkpoints``: there is a folder for them."""
    if checkpoints:
        return "Start again: the run goes on from the newest checkpoint."
    return (
        "There is no checkpoint folder: started again, the run begins with the first step. With Engine(checkpoint_dir=...) it "
        "would go on from the newest checkpoint."
    )
