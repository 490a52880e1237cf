"""Undo without copies: the inverse of the step, from the gradients that are still there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ftcomm.errors import ConfigError
from ftcomm.recovery.undo.copies import Copies
from ftcomm.recovery.undo.rule import WEAKEST, Rule, Stepped
from ftcomm.recovery.undo.tensors import address, version

__all__ = ["Plain"]

_EXACT = "Undo(..., exact=True) can."


class Plain:
    """What must be known of one optimizer's last step to invert it: settings, a few numbers, and that nothing changed since."""

    def __init__(self, optimizer: Any, rule: Rule, copies: Copies) -> None:
        self._optimizer = optimizer
        self._rule = rule
        self._copies = copies
        self._trouble = ""
        self._settings: list[dict[str, Any]] = []
        self._marks: list[Any] = []
        self._group_of: dict[Any, int] = {}
        self._notes: dict[Any, Any] = {}
        self._gradients: dict[Any, tuple[Any, int]] = {}
        self._moved: set[Any] = set()
        self._versions: dict[Any, dict[str, tuple[Any, int, int]]] = {}

    @property
    def nbytes(self) -> int:
        """Of the norms and ratios; each once."""
        flat = [part for note in self._notes.values() for part in (note if isinstance(note, tuple) else (note,))]
        held = {id(part): part for part in flat if isinstance(part, torch.Tensor)}
        return sum(part.numel() * part.element_size() for part in held.values())

    def drop(self) -> None:
        for kept in (
            self._settings,
            self._marks,
            self._group_of,
            self._notes,
            self._gradients,
            self._moved,
            self._versions,
        ):
            kept.clear()

    def before(self, params: Sequence[Any]) -> None:
        """The settings of this step: a scheduler may change them before it is undone."""
        self.drop()
        self._trouble = ""
        groups = self._optimizer.param_groups
        self._settings = [{k: _frozen(v) for k, v in group.items() if k != "params"} for group in groups]
        self._marks = [_fingerprint(group) for group in groups]
        wanted = set(params)
        with torch.no_grad():
            common = self._rule.common_note(self._optimizer)
            for at, group in enumerate(groups):
                mine = [p for p in group["params"] if p in wanted]
                self._group_of.update(dict.fromkeys(mine, at))
                self._notes.update(zip(mine, self._rule.notes(self._optimizer, group, mine, common), strict=True))
        self._gradients = {p: _gradient(p) for p in params}

    def after(self, params: Iterable[Any], closure: bool) -> None:
        """What gradients, parameters and state are right after the step; they must be so still when it is undone."""
        if [_fingerprint(group) for group in self._optimizer.param_groups] != self._marks:
            self._trouble = "settings of the optimizer were changed during the step, by another hook or the closure"
        seen = {p: _gradient(p) for p in params}
        # A closure computes gradients in the step: then nobody can tell who else changed them.
        self._moved = {p for p in seen if self._rule.moves_gradient(self._settings[self._group_of[p]], p)}
        if self._moved if closure else not all(self._untouched(p, now) for p, now in seen.items()):
            self._trouble = "its gradients were changed during the step, by another hook or the closure"
        groups = self._optimizer.param_groups
        if any(p.grad is not None and p not in seen for group in groups for p in group["params"]):
            self._trouble = "another hook or the closure gave a parameter its gradient during the step"
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in seen):
            self._trouble = "the closure computed sparse gradients"
        self._gradients = seen
        self._versions = {p: self._now(p) for p in seen}
        numbers = [count for now in self._versions.values() for _, count, _ in now.values()]
        if -1 in (*numbers, *(count for _, count in seen.values())):
            self._trouble = "gradients or state were made in inference mode, in which torch does not count writes"

    def _untouched(self, p: Any, now: tuple[Any, int]) -> bool:
        """Whether only the step itself wrote to the gradient, if anything did."""
        reference, count = self._gradients[p]
        return _same((reference, count + (p in self._moved)), now)

    def check(self, params: Sequence[Any]) -> None:
        """Says what stands against inverting, before anything is changed."""
        name = type(self._optimizer).__name__
        if self._trouble:
            raise ConfigError(f"The last step of {name} has no plain undo: {self._trouble}. {_EXACT}")
        for p in params:
            what = f"the parameter of shape {tuple(p.shape)} in group {self._group_of[p]} of {name}"
            if p.grad is None or not _same(_gradient(p), self._gradients[p]):
                gone = "is gone" if p.grad is None else "was replaced or changed"
                raise ConfigError(
                    f"The gradient of {what} {gone} since the step, and plain undo needs it. Undo before zero_grad() and "
                    f"before the next backward pass. {_EXACT}"
                )
            if not _unchanged(self._now(p), self._versions[p]):
                raise ConfigError(
                    f"There is no plain undo of a step after which something else changed: {what} or its state. {_EXACT}"
                )
            with torch.no_grad():
                state = self._optimizer.state.get(p) or {}
                if not all(_finite(value) for value in (p, p.grad, *state.values())):
                    raise ConfigError(
                        f"There is no plain undo of {what}: it, its gradient or state is not finite. {_EXACT}"
                    )
                if not abs(weakest := self._rule.weakest(self._stepped(p))) >= WEAKEST:  # nor NaN
                    raise ConfigError(
                        f"There is no plain undo of {what}: weight decay left {weakest:.3g} of the old value of an element in "
                        f"its new one, which is too little to tell it. {_EXACT}"
                    )

    def invert(self, params: Iterable[Any]) -> None:
        with torch.no_grad():
            for p in params:
                self._rule.invert(self._stepped(p))

    def _stepped(self, p: Any) -> Stepped:
        at = self._group_of[p]
        group = self._optimizer.param_groups[at]
        return Stepped(
            p,
            p.grad,
            self._optimizer.state.get(p) or {},
            self._settings[at],
            self._copies.group_now(group),
            self._copies.made(p),
            self._notes[p],
            p in self._moved,
        )

    def _now(self, p: Any) -> dict[str, tuple[Any, int, int]]:
        """Which tensors parameter and state are, how often they were written to, and where their memory is."""
        state = self._optimizer.state.get(p) or {}
        held = {"": p, **{name: value for name, value in state.items() if isinstance(value, torch.Tensor)}}
        return {name: (weakref.ref(value), version(value), address(value)) for name, value in held.items()}


def _unchanged(now: dict[str, tuple[Any, int, int]], was: dict[str, tuple[Any, int, int]]) -> bool:
    """A dead reference is that of a tensor that was replaced, whatever is in its place."""
    if now.keys() != was.keys():
        return False
    return all(now[name][0]() is was[name][0]() and now[name][1:] == was[name][1:] for name in now)


def _gradient(p: Any) -> tuple[Any, int]:
    """Which tensor the gradient is and how often it was written to. A weak reference, so that zero_grad() frees its memory."""
    return (None, 0) if p.grad is None else (weakref.ref(p.grad), version(p.grad))


def _same(one: tuple[Any, int] | None, other: tuple[Any, int]) -> bool:
    if one is None or one[0] is None or other[0] is None:
        return False
    return one[0]() is not None and one[0]() is other[0]() and one[1] == other[1]


def _finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(torch.isfinite(value).all())


def _frozen(value: Any) -> Any:
    """A setting as it is now: tensors are changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(_frozen(part) for part in value) if isinstance(value, tuple | list) else value


def _fingerprint(value: Any) -> Any:
    """Differs when a setting was changed; without reading tensors, for which a GPU would be waited for."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, dict):
        return {k: _fingerprint(v) for k, v in value.items() if k not in ("params", "step")}
    return [_fingerprint(part) for part in value] if isinstance(value, tuple | list) else value
