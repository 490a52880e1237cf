"""A stage's part in a schedule's step that nobody computes here: torch's own schedule runs, over outputs without content.

It receives, out of the log, all that the step's computation needs. When the last backward pass is asked for, all of that goes to
``compute``; what comes back is put where a real step would have it: gradients, losses and outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftcomm.communicator import Communicator
from ftcomm.recovery.engine.parallel.logged import Messages, Sent, hollow
from ftcomm.recovery.engine.parallel.work import Done, Item, add, tensors_of

__all__ = ["Compute", "Differing", "Form", "Ghost", "form_of", "signature"]

Differing = Callable[[Item, Done], str]
Compute = Callable[[Sequence[Item], Differing], Iterable[Done]]


class _Empty(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool

    def made(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype)  # not empty: torch's detection of anomalies looks for NaN


class Form(NamedTuple):
    """What a module's output looks like."""

    kind: type  # Tensor, tuple or list
    parts: tuple[_Empty, ...]


def form_of(output: Any) -> Form | None:
    """None: it is something else than a tensor, or a tuple or list of tensors."""
    if isinstance(output, Tensor):
        return Form(Tensor, (_empty(output),))
    if type(output) in (tuple, list) and all(isinstance(part, Tensor) for part in output):
        return Form(type(output), tuple(_empty(part) for part in output))
    return None


def signature(args: Any, kwargs: Any) -> Any:
    """Inputs with the same one have outputs of the same form."""
    return tuple((tuple(t.size()), t.dtype, t.requires_grad) for t in tensors_of((args, kwargs)))


class Ghost:
    """One step of ``schedule``.

    Args:
        forms: of outputs, by the inputs' signature.
        loss_form: of the last stage's loss.
        compute: takes the step's micro-batches, in the order of their backward passes, and what says of a result how it is not
            what was sent of that micro-batch; "": it is.
    """

    def __init__(
        self,
        schedule: Any,
        comm: Communicator,
        forms: dict[Any, Form],
        loss_form: Form | None,
        compute: Compute,
    ) -> None:
        self._schedule, self._stage, self._comm = schedule, schedule._stage, comm
        self._forms, self._loss_form, self._compute = forms, loss_form, compute
        self._sent: Sent | None = None
        self._forward_sends: dict[int, Messages] = {}  # of an item
        self._backward_sends: dict[int, Messages] = {}
        self._items: list[Item] = []
        self._shown: dict[int, tuple[tuple[Tensor, ...], Item]] = {}  # outputs of which the loss was not asked for yet
        self._placed: list[tuple[Item, tuple[Tensor, ...], Tensor]] = []  # outputs and losses without content
        self._anchor = torch.zeros((), requires_grad=True)  # gives the first stage's outputs a backward pass

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Within it the stage is one."""
        self._real = self._stage.forward_maybe_with_nosync
        loss_of = self._schedule._loss_fn
        self._stage.forward_maybe_with_nosync = self._forward
        if self._stage.is_last:
            self._schedule._loss_fn = self._loss
        try:
            with hollow(self._comm):
                yield
        finally:
            del self._stage.forward_maybe_with_nosync
            self._schedule._loss_fn = loss_of

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        key = signature(args, kwargs)
        if key not in self._forms:  # a batch of another size
            with torch.no_grad():
                form = form_of(self._real(*args, **kwargs))
            assert form is not None
            wants = any(form.wants_grad for known in self._forms.values() for form in known.parts)
            self._forms[key] = form._replace(parts=tuple(p._replace(wants_grad=wants) for p in form.parts))
        item = Item(args, kwargs)
        if self._sent is None:
            self._sent = Sent(self._comm, self._stage)
        self._forward_sends[id(item)] = self._sent.forward(len(self._forms[key].parts))
        inputs = [t for t in tensors_of((args, kwargs)) if t.requires_grad]
        outputs = _Layers.apply(self, item, self._forms[key].parts, self._anchor, *inputs)
        if self._stage.is_last:
            self._shown[id(outputs[0])] = outputs, item
        kind = self._forms[key].kind
        return outputs[0] if kind is Tensor else kind(outputs)

    def _loss(self, output: Any, target: Any, **more: Any) -> Tensor:
        outputs, item = self._shown.pop(id(output if isinstance(output, Tensor) else output[0]))
        item.has_loss, item.target, item.loss_kwargs = True, target, more
        assert self._loss_form is not None
        loss: Tensor = _Loss.apply(self._loss_form.parts[0], *outputs)
        self._placed.append((item, outputs, loss))
        return loss

    def ended(self, item: Item) -> None:
        """Its backward pass was asked for."""
        assert self._sent is not None
        self._items.append(item)
        self._backward_sends[id(item)] = self._sent.backward(sum(t.requires_grad for t in tensors_of(item.args)))
        if len(self._items) < self._schedule._n_microbatches:
            return
        placed = {id(item): (outputs, loss) for item, outputs, loss in self._placed}
        # One after another: nobody has room for the gradients of all micro-batches.
        for item, one in zip(self._items, self._compute(self._items, self._differing), strict=True):
            add(self._stage.submod, one)
            if id(item) not in placed:
                continue
            outputs, loss = placed[id(item)]
            assert one.loss is not None
            loss.detach().copy_(one.loss)
            for output, value in zip(outputs, one.outputs, strict=True):
                output.detach().copy_(value)

    def _differing(self, item: Item, done: Done) -> str:
        assert self._sent is not None
        forward = self._sent.differing("output", self._forward_sends[id(item)], done.forward)
        return forward or self._sent.differing("input's gradient", self._backward_sends[id(item)], done.backward)


class _Layers(torch.autograd.Function):  # type: ignore[misc]
    """The module, in a ghost: its output has no content, nor have its inputs' gradients."""

    @staticmethod
    def forward(ctx: Any, ghost: Ghost, item: Item, parts: tuple[_Empty, ...], anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.ghost, ctx.item = ghost, item
        ctx.inputs = [_empty(tensor) for tensor in inputs]
        ctx.set_materialize_grads(False)
        outputs = tuple(part.made() for part in parts)
        ctx.mark_non_differentiable(*[o for o, part in zip(outputs, parts, strict=True) if not part.wants_grad])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.item.gradients = gradients
        ctx.ghost.ended(ctx.item)
        return (None, None, None, None, *[part.made() for part in ctx.inputs])


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, part: _Empty, *outputs: Tensor) -> Tensor:
        ctx.outputs = [_empty(output) for output in outputs]
        return part.made()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *[part.made() if part.wants_grad else None for part in ctx.outputs])


def _empty(tensor: Tensor) -> _Empty:
    return _Empty(tuple(tensor.size()), tensor.dtype, tensor.requires_grad)
