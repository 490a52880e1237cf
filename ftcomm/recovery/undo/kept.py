"""One optimizer and its last step: the hooks, the marks of what was updated, and whether the step came to its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftcomm.errors import ConfigError
from ftcomm.recovery.undo import refusals
from ftcomm.recovery.undo.copies import Copies
from ftcomm.recovery.undo.plain import Plain

__all__ = ["Kept"]


class Kept:
    """The last step of one optimizer, as far as it is needed to undo it."""

    def __init__(self, optimizer: Any, exact: bool) -> None:
        self.optimizer = optimizer
        self.exact = exact
        self.rule = refusals.rule_of(optimizer, exact)
        refusals.check_groups(optimizer, self.rule, exact)
        refusals.check_params(optimizer, exact)
        self._copies = Copies(optimizer, None if exact else self.rule.scalars, self.rule.group_state)
        self._plain = None if exact else Plain(optimizer, self.rule, self._copies)
        self._marks: dict[Any, None] = {}  # in the optimizer's order
        self._under_way = False
        self._found_inf: Any = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
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
    def nbytes(self) -> int:
        return self._copies.nbytes + (self._plain.nbytes if self._plain else 0)

    def forget(self) -> None:
        self._marks.clear()
        self._under_way = False
        self._found_inf = None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.forget()
        self._copies.drop()
        if self._plain:
            self._plain.drop()

    def check(self, params: Sequence[Any]) -> None:
        """Raises if these cannot be taken back; nothing was changed then."""
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
        refusals.check_gradients(optimizer, self.rule, closure, self.exact)
        # A closure computes gradients in the step, and any parameter may get one.
        params = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None or (closure and p.requires_grad)
        ]
        self.forget()
        self._copies.take(params)
        if self._plain:
            self._plain.before(params)
        # Fused optimizers look at it themselves; read only when somebody asks, for a GPU would be waited for.
        self._found_inf = getattr(optimizer, "found_inf", None)
        self._marks = dict.fromkeys(params)
        self._under_way = True

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._under_way:
            return  # Undo was made, or told to forget, within the step
        if any(p.grad is None for p in self._marks):  # of a closure; these were not touched
            self._marks = {p: None for p in self._marks if p.grad is not None}
        if self._plain:
            self._plain.after(self._marks, _closure(args, kwargs))
        self._under_way = False

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
