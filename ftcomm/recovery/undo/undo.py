"""Undo: one step back for one optimizer, or for one per parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ftcomm.errors import Closed, ConfigError, Unsupported
from ftcomm.recovery.undo.kept import Kept

__all__ = ["Undo"]


class Undo:
    """Takes an optimizer's last step back: parameters and optimizer state are as before it.

    A rank that learns of a failure in the middle of the update has parameters of two iterations; undoing the updated ones gives
    it a consistent state again (SWIFT, section 4). Hooks on the optimizer note each step; the script calls ``optimizer.step()``
    as ever. Learning rates and other settings are not put back: they are a scheduler's.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or several (the optimizer in the backward pass: one for each parameter). Known
            are, by exact class, SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad and timm's Lamb and Lars.
        exact: bit for bit, from a copy of parameters and state made before each step. False: no copy, but the inverse of the
            step from the gradients, which must be there still; rounding leaves small differences (``docs/undo.md``).

    Raises:
        Unsupported: the optimizer or its settings cannot be undone; the message says why and what can be done. Also from
            ``optimizer.step()``, before anything is changed: for sparse gradients, and settings changed since.
    """

    def __init__(self, optimizer: Any, exact: bool = True) -> None:
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else _several(optimizer)
        if not optimizers:
            raise ConfigError("Undo got no optimizer. Give it the one whose steps are to be undone, or several.")
        _refuse_shared(optimizers)
        self.exact = bool(exact)
        self._closed = False
        self._kept: list[Kept] = []
        # Without an Undo nobody can undo: then each step need not be copied any more.
        weakref.finalize(self, _close, self._kept).atexit = False
        try:
            for one in optimizers:
                self._kept.append(Kept(one, self.exact))
        except BaseException:
            self.close()
            raise

    @property
    def updated(self) -> list[Any]:
        """The parameters that were updated since the last :meth:`forget` or :meth:`undo` and can be undone.

        After a step that an exception ended, all that the step would have updated: exact undo puts them right either way.
        """
        return [p for kept in self._kept for p in kept.updated]

    def undo(self, params: Iterable[Any] | None = None) -> None:
        """Parameters and their optimizer state become what they were before the last step of their optimizer.

        If one of them cannot be undone nothing is changed.

        Args:
            params: only these; None: all of :attr:`updated`.

        Raises:
            ConfigError: one was not updated, or is undone already; it is of another type or shape now; without ``params``, some
                optimizers stepped more often than others since the last :meth:`forget`; or, in plain undo, its gradient is not
                the step's any more, or the step was interrupted. The message says what to do.
        """
        self._open()
        _refuse_shared([kept.optimizer for kept in self._kept])
        wanted = self._wanted(params)
        parts = []
        for kept in self._kept:
            mine = [p for p in kept.updated if wanted is None or p in wanted]
            if wanted is None or mine:
                kept.refuse_interrupted()
            kept.check(mine)
            if mine or (wanted is None and kept.counted):
                parts.append((kept, mine))
        # The last one first: where optimizers share memory, its copy has in it what the others did before.
        for kept, mine in sorted(parts, key=lambda part: -part[0].at):
            kept.undo(mine)

    def forget(self) -> None:
        """Nobody can need the state before the last step any more. Memory is kept for the next one.

        Call it when the update is known to be complete everywhere: a later :meth:`undo` is then of later steps only.
        """
        self._open()
        for kept in self._kept:
            kept.forget()

    def memory(self) -> int:
        """Bytes held: copies of parameters and state, or the few numbers of plain undo."""
        return sum(kept.nbytes for kept in self._kept)

    def close(self) -> None:
        """Takes the hooks off and frees the memory. May be called twice."""
        self._closed = True
        _close(self._kept)

    def __reduce__(self) -> Any:
        raise Unsupported(
            "An Undo cannot be copied or pickled: the copy would not see the steps of its optimizer. Make one for the copy."
        )

    def _wanted(self, params: Iterable[Any] | None) -> set[Any] | None:
        updated = set(self.updated)
        if params is None:
            if not updated and not any(kept.interrupted or kept.counted for kept in self._kept):
                raise ConfigError(
                    "There is nothing to undo: no parameter was updated since Undo was made, or since the last undo() or "
                    "forget(), or the last step was skipped. undo.updated says what can be undone; one step back is all there is."
                )
            self._refuse_mixed()
            return None
        wanted = [params] if isinstance(params, torch.Tensor) else list(params)
        owner = {p: kept for kept in self._kept for p in kept.parameters}
        for p in wanted:
            if not isinstance(p, torch.Tensor) or p not in owner:
                what = f"a tensor of shape {tuple(p.shape)}" if isinstance(p, torch.Tensor) else type(p).__name__
                raise ConfigError(f"undo(params=[...]) got {what} that is no parameter of its optimizers.")
            if p not in updated:
                owner[p].refuse_interrupted()
                raise ConfigError(
                    f"The parameter of shape {tuple(p.shape)} was not updated, or is undone already. "
                    "Choose from undo.updated."
                )
        return set(wanted)

    def _refuse_mixed(self) -> None:
        """Steps of two iterations are not to be undone together: the result would be parameters that never were."""
        steps = {kept.steps for kept in self._kept if kept.updated}
        if len(steps) > 1:
            raise ConfigError(
                f"Of the optimizers some made {max(steps)} steps since the last forget() and some {min(steps)}: what was kept of "
                "them need not be of one iteration. Call forget() after each complete update; now undo(params=[...]) with those "
                "that the interrupted one updated, or load a checkpoint."
            )

    def _open(self) -> None:
        if self._closed:
            raise Closed(
                "This Undo was closed: its hooks are off. Make a new one before the step that is to be undone."
            )


def _several(optimizers: Any) -> list[Any]:
    try:
        return list(optimizers)
    except TypeError:
        return [optimizers]  # which is refused by its type


def _close(kept: list[Kept]) -> None:
    for one in kept:
        one.close()
    kept.clear()


def _refuse_shared(optimizers: Iterable[Any]) -> None:
    """Also before each undo: parameters can be added to an optimizer later."""
    seen: set[Any] = set()
    for one in optimizers:
        mine = {p for group in getattr(one, "param_groups", ()) for p in group["params"]}
        if seen & mine:
            raise ConfigError("A parameter is in two of the optimizers: which step of it is the last one is not known.")
        seen |= mine
