"""A stage's part in a schedule's step that nobody computes here: torch's own schedule runs, over outputs without content.

It receives, out of the log, all that the step's computation needs. When the last backward pass is asked for, all of that goes to
``compute``; what comes back is put where a real step would have it: gradients, losses and outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftcomm.recovery.engine.parallel.work import Done, Item, add, tensors_of

__all__ = ["Form", "Ghost", "form_of", "signature"]


class _Empty(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool

    def made(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype)


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
        compute: takes the step's micro-batches, in the order of their backward passes.
    """

    def __init__(
        self,
        schedule: Any,
        forms: dict[Any, Form],
        loss_form: Form | None,
        compute: Callable[[Sequence[Item]], Sequence[Done]],
    ) -> None:
        self._schedule, self._stage = schedule, schedule._stage
        self._forms, self._loss_form, self._compute = forms, loss_form, compute
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
        self._items.append(item)
        if len(self._items) < self._schedule._n_microbatches:
            return
        done = self._compute(self._items)
        add(self._stage.submod, done)
        by_item = {id(item): one for item, one in zip(self._items, done, strict=True)}
        for item, outputs, loss in self._placed:
            one = by_item[id(item)]
            assert one.loss is not None
            loss.detach().copy_(one.loss)
            for output, value in zip(outputs, one.outputs, strict=True):
                output.detach().copy_(value)


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
