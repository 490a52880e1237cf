"""Parallel replay: as replay, but the survivors compute micro-batches of the lost steps, while they wait.

SWIFT, section 5.2. For pipelines: the micro-batches of a logged step are independent of each other, and all that they need is in
the log. The result has the same bits, as gradients are added up in the same order. It pays where computing a step again takes
longer than sending the stage and its gradients around; so it has to be asked for.
"""

from __future__ import annotations

from ftcomm.recovery.strategies.replay import Replay

PARALLEL_REPLAY = Replay("parallel-replay", policy="replay", drops=False, waits=False)
