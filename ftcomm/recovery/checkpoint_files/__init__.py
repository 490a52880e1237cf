"""Checkpoints in files that plain ``torch.load(weights_only=True)`` reads; each is there whole or not at all.

>>> with ftcomm.recovery.CheckpointFolder("checkpoints", keep=3) as folder:
...     folder.save(120, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
...     step, state = folder.newest()

What is in a file and what a crash leaves is in ``docs/checkpoint-files.md``.
"""

from ftcomm.recovery.checkpoint_files.folder import CheckpointFolder

__all__ = ["CheckpointFolder"]
