"""Is a step of a sharded model (FSDP2) whole? The engine's collectives for it, which never fail, and the question at the end.

A rank whose shard group loses a member can't go on; the other groups do not notice, and wait for it in the all-reduces between
the replicas. So it does go on, with zeros for what it could not get: all ranks go through the same operations, FSDP2 is nowhere
left in the middle of one, and before the update all say whether theirs was whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ftcomm.errors import ConfigError, PeerFailure
from ftcomm.recovery.engine.own_operations import OwnOperations
from ftcomm.recovery.strategies.checkpoint import once_more
from ftcomm.torch import join
from ftcomm.torch.groups import outcome
from ftcomm.torch.point import point_of

__all__ = ["ShardedGradients"]

_SPOILT, _NEW_BUFFERS = 1, 2


class ShardedGradients:
    """What :class:`Gradients` is to DistributedDataParallel.

    Args:
        model: a module that fully_shard() was applied to.
        goes_on: after a death, with the same step again; else it is an error.
        checkpoints: there is a folder for them.

    Raises:
        ConfigError: it has collectives of its own, or torch is too old.
    """

    def __init__(self, model: Any, goes_on: bool, checkpoints: bool) -> None:
        self.module, self._goes_on, self._checkpoints = model, goes_on, checkpoints
        self._job = point_of(model).job
        self._own = OwnOperations(self._job)
        self._buffers: list[tuple[int, int]] = []
        self._epoch = 0
        self.weight = 1.0
        self.averaged = self._spoilt = self.shares_buffers = self._failed = False
        self.inside = False  # the body of a step
        self._job.needed = goes_on
        self._parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for part in self._parts:
            for group in _groups(part):  # one, or none if all of its parameters are its children's
                part.set_custom_all_gather(_AllGather(self, group._all_gather_comm))
                part.set_custom_reduce_scatter(_ReduceScatter(self, group._reduce_scatter_comm))

    def begin(self, weight: float) -> None:
        """A step begins. ``weight``: 1 where all ranks have as many samples; 0 for one that has none."""
        if self._failed:  # in a forward pass outside of the steps, and the script has caught it
            self._reset()
        self.weight = weight
        self._failed = self.averaged = self._spoilt = False
        self._epoch = self._job.epoch
        self._buffers = [_version(buffer) for buffer in self.module.buffers()]

    def contributors(self) -> frozenset[int]:
        """Collective: the ranks whose step was whole, the same on all.

        If that is all ranks, nobody was missing in any operation of the step, also not in the all-reduces between replicas, which
        torch starts, and which are finished without the dead: An operation that ends without a member was decided so by a rank
        of its group in whose view the member is gone, and which had not returned from it. That rank comes to this question
        afterwards, in another epoch than the one in which it has begun the step. And a replacement does not take the place of
        the dead here, as it comes in between steps.
        """
        everybody = join.everybody(self.module)
        whole = not self._spoilt and self._job.epoch == self._epoch
        flags = torch.zeros(everybody.size, dtype=torch.uint8)
        new = self._buffers != [_version(buffer) for buffer in self.module.buffers()]
        flags[self._job.rank] = (0 if whole else _SPOILT) | (_NEW_BUFFERS if new else 0)
        there = everybody.all_reduce(flags, "max").contributors
        said = flags.tolist()
        found = frozenset(rank for rank in there if not said[rank] & _SPOILT)
        self.shares_buffers = any(said[rank] & _NEW_BUFFERS for rank in found)
        if not self._goes_on and len(found) < everybody.size:
            self._fail({*range(everybody.size)} - {*there})
        return found

    def goes_on(self) -> bool:
        """An exception has left the step: there is a question at its end, for all that has happened in it."""
        return True

    def unanswered(self, wanted: set[int]) -> set[int]:
        """Who has not taken part in what follows the gradients: nothing does."""
        return set()

    def short(self, wanted: set[int]) -> set[int]:
        """Who may be missing in what the script has made since the step was decided."""
        return self._own.missing(wanted)

    def finish(self) -> None:
        """The step will be committed."""
        self._own.mark()

    def drop(self, raised: bool) -> None:
        """The step is dropped. ``raised``: an operation of the script's has failed, and the question was not asked."""
        if raised:  # for the others, who may be asking it
            self._spoilt = True
            self.contributors()
        self._reset()
        self._own.mark()

    def _reset(self) -> None:
        for part in self._parts:
            if part._get_fsdp_state()._is_root:
                part.reset_iter_state()
            for parameter in (parameter for group in _groups(part) for parameter in group.fsdp_params):
                # Of backward passes without synchronisation. From torch 2.15 on it is no more than the parameter's own.
                if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def joined(self) -> None:
        """Replacements have come in."""

    # -- the step's operations -----------------------------------------------------------------------------------

    def spoil(self, output: torch.Tensor, missing: set[int]) -> None:
        """Something could not be had. In a step that is for the question at its end, elsewhere it is for the script."""
        if not self._goes_on:
            self._fail(missing)
        if not self.inside:
            self._failed = True
            raise PeerFailure(
                f"Rank {', '.join(map(str, sorted(missing)))} died, and parameters can't be gathered without it. Outside of "
                "engine.step() that is the script's: catch it to go on with the next step, which waits for the replacement.",
                ranks=sorted(missing),
                operation="gathering of parameters",
                epoch=self._job.epoch,
            )
        self._spoilt = True
        output.zero_()  # what is there may be no number at all

    def _fail(self, missing: set[int]) -> None:
        raise PeerFailure(
            f"Rank {', '.join(map(str, sorted(missing)))} died, and with it shards that the others need. "
            + once_more(self._checkpoints),
            ranks=sorted(missing),
            operation="engine step",
            epoch=self._job.epoch,
        )


class _Pending(dist.Work):  # type: ignore[misc]
    """An operation under way. It succeeds for FSDP2, whatever becomes of it."""

    def __init__(self, owner: ShardedGradients, work: Any, output: torch.Tensor, group: Any) -> None:
        super().__init__()
        self._owner, self._work, self._output, self._group = owner, work, output, group

    def given(self, async_op: bool) -> _Pending | None:
        """What a collective gives back: as in torch, None for one that is over."""
        if async_op:
            return self
        self.wait()
        return None

    def wait(self, *timeout: Any) -> bool:
        work, self._work = self._work, None
        if work is None:
            return True
        ranks = dist.get_process_group_ranks(self._group)
        try:
            work.wait(*timeout)
        except dist.DistBackendError as error:
            if not isinstance(error.__cause__, PeerFailure):
                raise
            self._owner.spoil(self._output, {*error.__cause__.ranks})
            return True
        # It succeeds without those who were gone before it began, with zeros in their places.
        missing = {*range(len(ranks))} - {*outcome(work).contributors}
        if missing:
            self._owner.spoil(self._output, {ranks[rank] for rank in missing})
        return True


class _AllGather:
    def __init__(self, owner: ShardedGradients, default: Any) -> None:
        self._owner = owner
        self.allocate = default.allocate

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        return _Pending(self._owner, work, output_tensor, group).given(async_op)


class _ReduceScatter:
    def __init__(self, owner: ShardedGradients, default: Any) -> None:
        self._owner = owner
        self.allocate = default.allocate

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        owner = self._owner
        owner.averaged = True
        if not owner.weight:
            input_tensor.zero_()  # 0 * inf would be nan
        elif owner.weight != 1.0:
            input_tensor.mul_(owner.weight)
        work = dist.reduce_scatter_single(output=output_tensor, input=input_tensor, group=group, op=op, async_op=True)
        return _Pending(owner, work, output_tensor, group).given(async_op)


def _version(buffer: torch.Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), buffer._version


def _groups(part: Any) -> list[Any]:
    if not hasattr(part, "reset_iter_state"):
        raise ConfigError(f"Engine needs FSDPModule.reset_iter_state(), which torch {torch.__version__} does not have.")
    groups: list[Any] = part._get_fsdp_state()._fsdp_param_groups
    if len(groups) > 1:
        raise ConfigError("Engine needs fully_shard() with one mesh for all parameters of a module, not one for each.")
    for comm in (comm for group in groups for comm in (group._all_gather_comm, group._reduce_scatter_comm)):
        if type(comm).__name__ not in ("DefaultAllGather", "DefaultReduceScatter", "_AllGather", "_ReduceScatter"):
            raise ConfigError(
                f"The model has a collective of its own ({type(comm).__name__}). The Engine gathers and scatters with its own: "
                "remove set_custom_all_gather(...), set_custom_reduce_scatter(...) and the like from the script."
            )
    return groups
