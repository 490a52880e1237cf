"""ftcomm as a backend of ``torch.distributed``, and what a training script adds to live through failures.

>>> dist.init_process_group("ftcomm", pg_options=ftcomm.Options(policy="lossy"))
>>> ddp.register_comm_hook(None, ftcomm.torch.lossy_hook)
>>> here = ftcomm.torch.join_point(ddp, optimizer)              # once a step

``import ftcomm.torch`` is only needed for the names below: torch finds the backend by itself.
"""

from __future__ import annotations

from ftcomm.torch.errors import BackendError
from ftcomm.torch.groups import communicator, outcome
from ftcomm.torch.hooks import lossy_hook
from ftcomm.torch.join import Join, join_point
from ftcomm.torch.register import register_backend

__all__ = ["BackendError", "Join", "communicator", "join_point", "lossy_hook", "outcome", "register_backend"]
