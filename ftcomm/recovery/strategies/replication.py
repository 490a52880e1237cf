"""Replication: a replacement gets its state from the others, which hold the same, and the run goes on as if nothing had been.

SWIFT (Zhong, Sheng, Liu, Yuan, Wu), section 4. There the survivors of a failure may be in the middle of an update, and have to
undo it. Here the outcome of each all-reduce is the same on all survivors, and an update begins when all of them are known to hold
every rank's gradients: an update that has begun is finished by all.
"""

from __future__ import annotations

from ftcomm.recovery.strategies.base import Strategy

REPLICATION = Strategy("replication", policy="lossy", drops=True, waits=True, shards=True)
