"""DDP's gradient buckets, made anew on all ranks when somebody joins.

Survivors have ordered their buckets by the first backward pass; a replacement has not, and torch would exchange the new order
only among ranks that are in their first iteration. With new reducers everywhere, the next iteration is the first for all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

__all__ = ["Layout", "layout_of", "parameters_of", "renew", "set_layout"]

Layout = list[list[int]]  # parameters by number, bucket after bucket, in the order of their all-reduces

_layouts: weakref.WeakKeyDictionary[Any, Layout] = weakref.WeakKeyDictionary()


def layout_of(ddp: Any) -> Layout | None:
    """The buckets that a new reducer will have; None: those of a first iteration."""
    return _layouts.get(ddp)


def set_layout(ddp: Any, layout: Layout | None) -> None:
    """For new reducers. Sums over a ring depend in their last bits on where in a bucket an element is."""
    if layout is None:
        _layouts.pop(ddp, None)
    else:
        _layouts[ddp] = layout


def renew(ddp: Any) -> None:
    """Replaces the reducer of a DistributedDataParallel, with its hooks and settings. Does not communicate."""
    builtin, wrapped = _builtin_hook(ddp), _wrapped(ddp)
    ddp._has_rebuilt_buckets = False
    ddp._static_graph_delay_allreduce_enqueued = False
    ddp.logger = None  # holds the old reducer
    ddp.reducer = None  # its destructor takes its autograd hooks off the parameters
    with _as_wrapped(ddp, wrapped), _as_laid_out(ddp):
        parameters, sparse = ddp._build_params_for_reducer()
        ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        reset_hook_state(state)
        dist._register_comm_hook(ddp.reducer, state, hook)
    if builtin is not None:
        dist._register_builtin_comm_hook(ddp.reducer, builtin)
    if getattr(ddp, "mixed_precision", None) is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    ddp.require_forward_param_sync = True


@contextlib.contextmanager
def _as_laid_out(ddp: Any) -> Iterator[None]:
    """torch asks one function for the buckets of a new reducer. It reverses what it gets."""
    layout = layout_of(ddp)
    if layout is None:
        yield
        return
    original = dist._compute_bucket_assignment_by_size

    def known(_: Any, limits: list[int], *__: Any) -> tuple[Layout, list[int]]:
        return [list(bucket) for bucket in reversed(layout)], [limits[-1]] * len(layout)

    dist._compute_bucket_assignment_by_size = known
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = original


def parameters_of(ddp: Any) -> list[Any]:
    """Those that the reducer has, by the numbers of a layout."""
    with _as_wrapped(ddp, _wrapped(ddp)):
        found: list[Any] = ddp._build_params_for_reducer()[0]
    return found


def _wrapped(ddp: Any) -> list[Any]:
    """The parameters that DDP was made with: those whose gradients were wanted then."""
    try:
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # sparse gradients: these buckets have no memory before the first backward pass
        return [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    return [parameter for bucket in buckets for parameter in bucket.parameters()]


@contextlib.contextmanager
def _as_wrapped(ddp: Any, wrapped: list[Any]) -> Iterator[None]:
    """torch takes the parameters for a reducer whose gradients are wanted now. A script may have frozen some since, and a
    replacement, which begins as all did, has not: all have to have the same buckets."""
    known = {id(parameter) for parameter in wrapped}
    changed = [one for one in ddp.module.parameters() if one.requires_grad != (id(one) in known)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


def _builtin_hook(ddp: Any) -> Any:
    """A hook registered with _register_builtin_comm_hook, which DDP itself does not keep."""
    if ddp._comm_hooks or ddp.logger is None:
        return None
    name = ddp._get_ddp_logging_data().get("comm_hook", "")
    return getattr(dist.BuiltinCommHookType, name, None)


def reset_hook_state(state: Any) -> None:
    """PowerSGD keeps errors and factors by bucket, and counts iterations until its start, as post-local SGD does.

    All of that begins again, on all ranks.
    """
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        kept = getattr(state, name, None)
        if isinstance(kept, dict):
            kept.clear()
    if isinstance(getattr(state, "iter", None), int):
        state.iter = 0


def hook_random_states(ddp: Any) -> list[Any]:
    """Random generators of hook states (PowerSGD): equal on all ranks, so a replacement needs the survivors'."""
    return [getattr(getattr(state, "rng", None), "get_state", lambda: None)() for _, state in ddp._comm_hooks]


def set_hook_random_states(ddp: Any, values: list[Any]) -> None:
    for (_, state), value in zip(ddp._comm_hooks, values, strict=False):
        if value is not None and hasattr(getattr(state, "rng", None), "set_state"):
            state.rng.set_state(value)
