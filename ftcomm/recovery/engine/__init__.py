"""The training loop that goes on: undo, agree, transfer, and the same step again."""

from ftcomm.recovery.engine.engine import Engine

__all__ = ["Engine"]
