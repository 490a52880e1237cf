"""Parallel recovery: the survivors compute micro-batches of a replacement's steps (SWIFT, section 5.2)."""

from ftcomm.recovery.engine.parallel.recovery import ParallelReplay

__all__ = ["ParallelReplay"]
