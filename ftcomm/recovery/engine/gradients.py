"""Whose gradients are in the averages of one step: the engine's DDP hook, which keeps each all-reduce's outcome."""

from typing import Any  # annotations are real here: DDP compares them with its own types

import torch
import torch.distributed as dist

from ftcomm.errors import ConfigError
from ftcomm.recovery.engine.own_operations import OwnOperations
from ftcomm.torch import join, reducer
from ftcomm.torch._extension import load
from ftcomm.torch.groups import backend_of, job_of, outcome

__all__ = ["Gradients"]


class Gradients:
    """Averages a DistributedDataParallel's buckets as ``ftcomm.torch.lossy_hook`` does, and says who is in all of them.

    Args:
        ddp: a DistributedDataParallel without a hook.

    Raises:
        ConfigError: it has a hook.
    """

    def __init__(self, ddp: Any) -> None:
        if ddp._comm_hooks:
            raise ConfigError(
                "The model has a communication hook already. The Engine averages gradients with a hook of its own: remove "
                "register_comm_hook(...) from the script; or make one Engine for this model, if it was made twice."
            )
        self.group = ddp.process_group
        self._own = OwnOperations(job_of(backend_of(self.group)))
        self._slots = backend_of(self.group).slots
        self.weight = 1.0  # of this rank's gradients in the coming step
        self._works: list[Any] = []
        self._ddp, self._look = ddp, True
        self.module, self.inside = ddp.module, False
        # Every rank gets rank 0's buffers before the update, and not, as DDP has it, at the next forward pass: then they are
        # equal at each step's end, and no death can take the only ones along.
        self.shares_buffers, ddp.broadcast_buffers = ddp.broadcast_buffers, False
        ddp.register_comm_hook(self, _hook)

    def begin(self, weight: float) -> None:
        """A step begins. ``weight``: 1 where all ranks have as many samples; 0 for one that has none."""
        self.weight = weight
        self._works.clear()
        self._own.mark()

    def joined(self) -> None:
        """DDP has a new reducer. It orders its buckets by its first iteration, and keeps to that from the second on."""
        self._look = True

    def drop(self, raised: bool) -> None:
        """The step is dropped. ``raised``: by an operation that failed, maybe in the middle of a backward pass, on all ranks."""
        if raised:
            reducer.renew(self._ddp)
            self._look = True
        self._own.mark()

    def unanswered(self, wanted: set[int]) -> set[int]:
        """Who may be missing in an operation of this step whose outcome is not known here.

        That is DDP's question which parameters were used, and what the script has made itself: without any this costs nothing.
        Else collective: who takes part in an operation after them has taken part in them.
        """
        if not self._ddp.find_unused_parameters and self._own.since() <= len(self._works):
            return set()
        return wanted - {*join.everybody(self._ddp).all_reduce(torch.zeros(1), "max").contributors}

    def short(self, wanted: set[int]) -> set[int]:
        """Who may be missing in what the script has made since the step was decided."""
        return self._own.missing(wanted)

    def finish(self) -> None:
        """The step will be committed."""
        self._lay_out()
        self._own.mark()

    def _lay_out(self) -> None:
        """Collective, as the last of the first step with a new reducer: its buckets of the second step, for a replacement.

        DDP would order them in the next forward pass. Who dies between would have the others begin with a first iteration again,
        whose sums over a ring differ in their last bits.
        """
        if not self._look or not self._works:
            return
        ddp = self._ddp
        if ddp.reducer._rebuild_buckets():
            ddp._has_rebuilt_buckets = True
        number = {parameter: index for index, parameter in enumerate(reducer.parameters_of(ddp))}
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        reducer.set_layout(ddp, [[number[parameter] for parameter in bucket.parameters()] for bucket in buckets])
        self._look = False

    @property
    def averaged(self) -> bool:
        """Whether there was a backward pass that was not in no_sync()."""
        return bool(self._works)

    def goes_on(self) -> bool:
        """An exception has left the step, on all ranks alike. False: in a backward pass, after its first average."""
        if not self._works:
            reducer.renew(self._ddp)  # it may have been before the first
            self._look = True
            return True
        buckets = len(self._ddp.reducer._get_zeros_like_grad_buckets())
        return len(self._works) % buckets == 0 and all(work.is_success() for work in self._works)

    def contributors(self) -> "frozenset[int] | None":
        """Job ranks whose gradients are in every part of every average of this step; None if there was none.

        The same on all ranks: it is what the all-reduces have decided.
        """
        if not self._works:
            return None
        found = [outcome(work).contributors for work in self._works]
        return frozenset(self._slots[rank] for rank in set.intersection(*map(set, found)))

    def all_reduce(self, bucket: Any) -> Any:
        buffer = bucket.buffer()
        if not self.weight:
            buffer.zero_()  # 0 * inf would be nan
        elif self.weight != 1.0:
            buffer.mul_(self.weight)
        work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
        self._works.append(work)
        return load().tensor_future(work)


def _hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.all_reduce(bucket)
