"""Immediate mini-batch rollback: the step in which a rank died is dropped and done again by the survivors, without waiting."""

from __future__ import annotations

from ftcomm.recovery.strategies.base import Strategy

ROLLBACK = Strategy("rollback", policy="lossy", drops=True, waits=False)
