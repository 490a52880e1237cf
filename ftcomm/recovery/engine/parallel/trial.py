"""A module that the script has changed between steps: whether others can still compute it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed import distributed_c10d

from ftcomm.communicator import Communicator
from ftcomm.recovery.engine.message import Packed
from ftcomm.recovery.engine.parallel.ghost import Form, form_of, signature
from ftcomm.recovery.engine.parallel.watch import Watch, copy_of
from ftcomm.recovery.engine.parallel.work import Item, compute, fresh

__all__ = ["kind_of", "trial"]


def kind_of(packed: Packed) -> Any:
    """Equal for modules that differ in the content of their tensors only."""
    tensors = [(t.dtype, tuple(t.size()), t.stride(), t.requires_grad) for t in packed.tensors]
    return packed.structure, tensors


def trial(packed: Packed, item: Item, forms: dict[Any, Form], comm: Communicator) -> str | None:
    """Why not, or None. Before the step is begun, as then it can still be a real one: a copy of the module and its loss function
    computes a micro-batch of an earlier step, and is watched as the first step was. Nothing of that stays."""
    module, loss_of = copy = copy_of(packed)
    watch = Watch(copy, comm, whole=True)
    try:
        with _unheard(), watch:
            args, kwargs = fresh((item.args, item.kwargs))
            form = form_of(module(*args, **kwargs))
            compute(module, loss_of, item)
    except Exception as error:  # noqa: BLE001 - of the module
        return f"the script has changed the module, and a trial of it fails ({type(error).__name__}: {error})"
    finally:
        watch.undraw()
    if watch.found is not None:
        return f"the script has changed the module, and now it {watch.found}"
    if form != forms.get(signature(args, kwargs)):
        return "the script has changed the module, and its output looks different now"
    return None


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What the module says to other ranks is said in the step itself, once."""
    world = distributed_c10d.GroupMember.WORLD
    distributed_c10d.GroupMember.WORLD = None
    try:
        yield
    finally:
        distributed_c10d.GroupMember.WORLD = world
