"""Where the engine's batches come from: each sample of an epoch once, across deaths, joins and retried steps.

>>> source = make_source(loader, rank, slots, keep_batch=True, seed=7)
>>> share = source.draw(alive)  # None: the epoch is over
>>> source.commit(contributed)

For the engine; scripts hand their loader to it. What is exactly once, what is not, and what it costs is in ``docs/data.md``.
"""

from ftcomm.recovery.data.make import make_source
from ftcomm.recovery.data.shares import Shares
from ftcomm.recovery.data.source import Share, Source

__all__ = ["Share", "Shares", "Source", "make_source"]
