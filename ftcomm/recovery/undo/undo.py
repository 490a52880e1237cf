"""Undo: one step back for one optimizer, or for one per parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ftcomm.errors import Closed, ConfigError
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
        seen: set[Any] = set()
        for one in optimizers:
            mine = {p for group in getattr(one, "param_groups", ()) for p in group["params"]}
            if seen & mine:
                raise ConfigError(
                    "A parameter is in two of the optimizers: which step of it is the last one is not known."
                )
            seen |= mine
        self.exact = bool(exact)
        self._closed = False
        self._kept: list[Kept] = []
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
            ConfigError: one was not updated, or is undone already; or, in plain undo, its gradient is not the step's any more, or
                the step was interrupted. The message says what to do.
        """
        self._open()
        wanted = self._wanted(params)
        parts = []
        for kept in self._kept:
            mine = [p for p in kept.updated if wanted is None or p in wanted]
            if wanted is None or mine:
                kept.refuse_interrupted()
            kept.check(mine)
            parts.append((kept, mine))
        for kept, mine in parts:
            if mine:
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
        for kept in self._kept:
            kept.close()
        self._closed = True
        self._kept = []

    def _wanted(self, params: Iterable[Any] | None) -> set[Any] | None:
        updated = set(self.updated)
        if params is None:
            if not updated and not any(kept.interrupted for kept in self._kept):
                raise ConfigError(
                    "There is nothing to undo: no parameter was updated since Undo was made, or since the last undo() or "
                    "forget(), or the last step was skipped. undo.updated says what can be undone; one step back is all there is."
                )
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
