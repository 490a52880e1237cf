"""One optimizer and its last step: the hooks, the marks of what was updated, and whether the step came to its end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ftcomm.errors import ConfigError
from ftcomm.recovery.undo import refusals
from ftcomm.recovery.undo.copies import Copies
from ftcomm.recovery.undo.plain import Plain
from ftcomm.recovery.undo.tensors import is_dtensor, version

__all__ = ["Kept"]

_order = itertools.count(1)


class Kept:
    """The last step of one optimizer, as far as it is needed to undo it.

    Attributes:
        steps: how many began since the last forget() or complete undo().
        at: the place of the last one among the steps of all optimizers.
    """

    def __init__(self, optimizer: Any, exact: bool) -> None:
        self.optimizer = optimizer
        self.exact = exact
        self.rule = refusals.rule_of(optimizer, exact)
        refusals.check_groups(optimizer, self.rule, exact)
        self._checked: list[int] = []
        self._check_params()
        self._copies = Copies(optimizer, None if exact else self.rule.scalars, self.rule.group_state)
        self._plain = None if exact else Plain(optimizer, self.rule, self._copies)
        self._marks: dict[Any, None] = {}  # in the optimizer's order
        # Of parameters that might get a gradient in the step, how often each was written to before. torch counts no writes of
        # fused code: their parameters are put back in any case.
        self._maybe: dict[Any, int] = {}
        self._under_way = False
        self._found_inf: Any = None
        self.steps = self.at = 0
        # Not for torch.compile: it would take the marks and versions of one step for those of all.
        self._handles = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._before)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._after)),
            # The state is another one then, and not of the last step.
            optimizer.register_load_state_dict_post_hook(lambda _: self.forget()),
        ]

    @property
    def parameters(self) -> set[Any]:
        return {p for group in self.optimizer.param_groups for p in group["params"]}

    @property
    def interrupted(self) -> bool:
        """The step began and never came to its end; without copies nobody knows what it did."""
        return self._under_way

    @property
    def updated(self) -> list[Any]:
        return [] if self._skipped() or (self._under_way and not self.exact) else list(self._marks)

    @property
    def counted(self) -> bool:
        """The step changed what its groups count (Lamb), which it does without any gradient as well."""
        return self.steps > 0 and self.at > 0 and bool(self.rule.group_state) and not self._skipped()

    @property
    def nbytes(self) -> int:
        return self._copies.nbytes + (self._plain.nbytes if self._plain else 0)

    def forget(self) -> None:
        self._clear()
        self.steps = 0

    def _clear(self) -> None:
        self._marks.clear()
        self._maybe.clear()
        self._under_way = False
        self._found_inf = None
        self.at = 0

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.forget()
        self._copies.drop()
        if self._plain:
            self._plain.drop()

    def check(self, params: Sequence[Any]) -> None:
        """Raises if these cannot be taken back; nothing was changed then."""
        self._copies.check(params)
        if self._plain:
            self._plain.check(params)

    def undo(self, params: Sequence[Any]) -> None:
        if self._plain:
            self._plain.invert(params)
        self._copies.put_back(params)
        for p in params:
            del self._marks[p]
        if not self._marks:
            # What a group counts is of all its parameters: it goes back with the last of them.
            self._copies.put_groups_back()
            self.forget()

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = _closure(args, kwargs)
        refusals.check_groups(optimizer, self.rule, self.exact)
        self._check_params()
        refusals.check_gradients(optimizer, self.rule, closure, self.exact)
        # A closure or a hook after this one may give any parameter a gradient. Plain undo finds that out after the step.
        later = self.exact and next(reversed(optimizer._optimizer_step_pre_hooks)) != self._handles[0].id
        every = [p for group in optimizer.param_groups for p in group["params"]]
        params = [p for p in every if p.grad is not None or closure or later]
        self._clear()
        self._copies.take(params)
        if self._plain:
            self._plain.before(params)
        # Fused optimizers look at it themselves; read only when somebody asks, for a GPU would be waited for. One that is
        # shared between ranks would have to be asked for there, after a failure: such a step is put back, skipped or not.
        found: Any = getattr(optimizer, "found_inf", None)
        self._found_inf = found.clone() if type(found) is torch.Tensor else None
        if closure or later:
            counted = (group["params"] for group in optimizer.param_groups if not group.get("fused"))
            self._maybe = {p: version(p) for group in counted for p in group if not is_dtensor(p)}
        self._marks = dict.fromkeys(params)
        self.at = next(_order)
        self.steps += 1
        self._under_way = True

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._under_way:
            return  # Undo was made, or told to forget, within the step
        # A gradient that is gone says nothing alone: a hook before this one may have cleared it after the update.
        still = [p for p, seen in self._maybe.items() if p.grad is None and version(p) == seen != -1]
        for p in still:
            del self._marks[p]
        self._maybe.clear()
        if self._plain:
            self._plain.after(self._marks, _closure(args, kwargs))
        self._under_way = False

    def _check_params(self) -> None:
        """At each step, for groups may be added; what shares memory only if there are others than before."""
        now = [id(p) for group in self.optimizer.param_groups for p in group["params"]]
        refusals.check_params(self.optimizer, self.exact)
        if now != self._checked and not self.exact:
            refusals.check_memory(self.optimizer)
        self._checked = now

    def _skipped(self) -> bool:
        """GradScaler found infinities, and the fused step did nothing."""
        return self._found_inf is not None and bool(self._found_inf.item())

    def refuse_interrupted(self) -> None:
        if self._under_way and not self.exact:
            raise ConfigError(
                f"The last step of {type(self.optimizer).__name__} was interrupted in its middle, and plain undo cannot know "
                "which parameters it reached. Undo(..., exact=True) can. Load a checkpoint, or take the state of another rank."
            )


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:])
