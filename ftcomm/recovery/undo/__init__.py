"""One optimizer step back: what was updated before a failure is undone (SWIFT, section 4 and appendix A).

>>> undo = ftcomm.recovery.Undo(optimizer)
>>> optimizer.step()
>>> undo.undo()  # parameters and optimizer state as before that step

What is exact, what is not and what it costs is in ``docs/undo.md``.
"""

from ftcomm.recovery.undo.undo import Undo

__all__ = ["Undo"]
