"""Whether others can compute a stage: what can be said of it at once, and what one real step shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from ftcomm.communicator import Communicator
from ftcomm.recovery.engine.message import pack
from ftcomm.recovery.engine.parallel.ghost import Form, form_of, signature
from ftcomm.recovery.engine.parallel.logged import Messages, Sent
from ftcomm.recovery.engine.parallel.trial import kind_of
from ftcomm.recovery.engine.parallel.watch import Watch, equal
from ftcomm.recovery.engine.parallel.work import Content, Item, content_of, fresh, tensors_of
from ftcomm.torch.groups import others_open

__all__ = ["Observer", "obstacle"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def obstacle(schedule: Any, model: nn.Module, comm: Communicator) -> str | None:
    """What stands in the way of sharing a stage's work, as far as it can be seen before a step; or None."""
    if not isinstance(schedule, schedules.PipelineScheduleSingle):
        return f"{type(schedule).__name__} has several stages on a rank"
    stage: Any = schedule._stage
    if not hasattr(stage, "forward_maybe_with_nosync") or not hasattr(stage, "backward_maybe_with_nosync"):
        return f"torch {torch.__version__} has stages of another kind"
    if stage.submod is not model:
        return "the schedule's stage was made of another module than the engine's"
    if stage.group not in (None, torch.distributed.group.WORLD) or others_open():
        return "there are other process groups than the default one"
    if schedule._loss_fn is None:
        return "the schedule has no loss_fn on this rank, and so no backward pass"
    if stage.dw_builder is not None:
        return "the stage has a dw_builder"
    if len(comm._job.log_group) > 1:
        return "messages inside its log group are in no log"
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return "a DistributedDataParallel synchronises in its backward pass"
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            return f"{type(module).__name__} has hooks, which see what is computed here only"
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            return "the module is compiled"
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "cpu":
            return f"its parameters are on {tensor.device}, and others compute on the CPU only so far"
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            return "a parameter has hooks"
    return None


class Observer:
    """Watches a real step.

    Attributes:
        obstacle: what it has found; None: others can compute this.
        forms: of the module's outputs, by the inputs' signature.
        loss_form: of the loss.
        item: a micro-batch of the step, without its results.
        kind: of the module and the loss function, if there is no obstacle.
    """

    def __init__(self, schedule: Any, comm: Communicator) -> None:
        self._schedule, self._stage, self._comm = schedule, schedule._stage, comm
        self._loss_of = schedule._loss_fn if self._stage.is_last else None
        self.obstacle: str | None = None
        self.forms: dict[Any, Form] = {}
        self.loss_form: Form | None = None
        self.item: Item | None = None
        self.kind: Any = None
        self._wanted = self._got = 0  # gradients of inputs
        self._inputs: list[Tensor] = []  # that came from the stage before
        self._outputs: dict[int, Tensor] = {}
        self._copied = False
        self._sent: Sent | None = None
        self._sends: list[tuple[Messages, list[Content]]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        stage, loss_of = self._stage, self._schedule._loss_fn
        forward, backward = stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync
        handles: list[Any] = []

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._sent is None:
                self._sent = Sent(self._comm, stage)
            output = self._same("forward pass", forward, *args, **kwargs)
            form = form_of(output)
            if form is None:
                self._refuse(f"its output is a {type(output).__name__}, not tensors")
            elif torch.is_grad_enabled():
                self.forms[signature(args, kwargs)] = form
                self.item = self.item or Item(*fresh((args, kwargs)))
                inputs = [t for t in tensors_of((args, kwargs)) if t.requires_grad]
                self._wanted += len(inputs)
                handles.extend(t.register_hook(lambda _: self._count()) for t in inputs)
                self._inputs += [] if stage.is_first else tensors_of(args)
                self._outputs |= {id(t): t for t in tensors_of(output)}
                self._sends.append((self._sent.forward(len(form.parts)), [content_of(t) for t in tensors_of(output)]))
                self._only_inside(output, self._inputs)
            return output

        def lost(*args: Any, **kwargs: Any) -> Any:
            loss = self._same("loss function", loss_of, *args, **kwargs)
            self.loss_form = form_of(loss)
            # Else a schedule asks for shapes, with an output of its own.
            if all(id(t) in self._outputs for t in tensors_of(args[:1])):
                self._only_inside(loss, self._inputs)
                if self.item is not None and not self.item.has_loss:
                    self.item.has_loss, self.item.target, self.item.loss_kwargs = True, args[1], kwargs
            if self.loss_form is None or self.loss_form.kind is not Tensor:
                self._refuse(f"its loss is a {type(loss).__name__}")
            return loss

        def undone(*args: Any, **kwargs: Any) -> Any:
            if self.item is not None and not (self.item.has_loss or self.item.gradients):
                self.item.gradients = tuple(args[1]["output_grads"])
            result = self._same("backward pass", backward, *args, **kwargs)
            if self._sent is not None:
                gradients = [content_of(t) for t in tensors_of(result[0])]
                self._sends.append((self._sent.backward(len(gradients)), gradients))
            return result

        stage.forward_maybe_with_nosync = watched
        stage.backward_maybe_with_nosync = undone
        if stage.is_last:
            self._schedule._loss_fn = lost
        try:
            yield
        finally:
            del stage.forward_maybe_with_nosync, stage.backward_maybe_with_nosync
            self._schedule._loss_fn = loss_of
            for handle in handles:
                handle.remove()
        if self._sent is not None and any(self._sent.differing("", *messages) for messages in self._sends):
            self._refuse("it sends something else than its outputs and its inputs' gradients")
        if not self.forms:
            self._refuse("its forward pass made no gradients in its first step")
        if self._got != self._wanted:
            self._refuse("not all of its inputs get gradients")
        if any(p.grad is not None and p.grad.layout != torch.strided for p in stage.submod.parameters()):
            self._refuse("its gradients are sparse")
        if self.obstacle is None:
            self.kind = kind_of(pack((stage.submod, self._loss_of)))

    def _count(self) -> None:
        self._got += 1

    def _refuse(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    def _same(self, what: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs it, and looks whether it leaves everything but its result as it was."""
        if self.obstacle is not None:
            return run(*args, **kwargs)
        first = what == "forward pass" and not self._copied
        try:
            watch = Watch((self._stage.submod, self._loss_of), self._comm, whole=first)
        except Exception as error:  # noqa: BLE001 - whatever pickle says of it
            self._refuse(f"the module or the loss function cannot be pickled ({type(error).__name__}: {error})")
            return run(*args, **kwargs)
        with watch:
            result = run(*args, **kwargs)
        if watch.found is not None:
            self._refuse(f"its {what} {watch.found}")
        elif first:
            self._copied = True
            self._compare(watch.copy()[0], args, kwargs, result)
        return result

    def _compare(self, copy: nn.Module, args: Any, kwargs: Any, wanted: Any) -> None:
        """A copy computes the same, or it depends on what is not in it."""
        found, wanted = tensors_of(copy(*args, **kwargs)), tensors_of(wanted)
        if len(found) != len(wanted) or not all(map(equal, found, wanted)):
            self._refuse("a copy of the module computes something else")

    def _only_inside(self, ends: Any, inputs: Sequence[Tensor]) -> None:
        known = {id(tensor) for tensor in [*self._stage.submod.parameters(), *inputs]}
        if any(id(leaf) not in known for leaf in _leaves(tensors_of(ends))):
            self._refuse("it has gradients for tensors that are not parameters of the module")


def _leaves(ends: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors that a backward pass from there gives gradients to."""
    seen: set[Any] = set()
    open_ = [end.grad_fn for end in ends if end.grad_fn is not None]
    while open_:
        node = open_.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        open_ += [following for following, _ in node.next_functions if following is not None]
