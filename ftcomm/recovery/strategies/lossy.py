"""Lossy forward: the step is finished with the averages over those who have contributed, and the run goes on without the dead."""

from __future__ import annotations

from ftcomm.recovery.strategies.base import Strategy

LOSSY = Strategy("lossy", policy="lossy", drops=False, waits=False)
