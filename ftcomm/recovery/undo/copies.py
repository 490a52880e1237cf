"""Copies of parameters and optimizer state before a step, in buffers that are used again each step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ftcomm.errors import ConfigError, Unsupported
from ftcomm.recovery.undo.tensors import address, local, no_copy, no_fit

__all__ = ["Copies"]

_PARAMETER = ""  # where the state has names
_NUMBERS = (bool, int, float, str, type(None))


class Copies:
    """What an optimizer's parameters and state were before its last step.

    Args:
        names: only state of these names, and no parameters; None: everything.
        group_state: what a step changes in the groups.
    """

    def __init__(self, optimizer: Any, names: frozenset[str] | None, group_state: tuple[str, ...]) -> None:
        self._optimizer = optimizer
        self._names = names
        self._group_state = group_state
        self._buffers: dict[tuple[Any, str], Any] = {}
        # Of each parameter what its state was made of; None if it had none. The tensors in it are the optimizer's own.
        self._before: dict[Any, dict[str, Any] | None] = {}
        # What the last plan was made of, and the plan: the same tensors are copied to the same buffers step by step.
        self._seen: list[Any] = []
        self._places: list[int] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._groups: list[tuple[dict[str, Any], str, Any, Any]] = []

    @property
    def nbytes(self) -> int:
        held = [*self._buffers.values(), *(copy for *_, copy in self._groups if isinstance(copy, torch.Tensor))]
        return sum(buffer.numel() * buffer.element_size() for buffer in held)

    def drop(self) -> None:
        self._buffers.clear()
        self._before.clear()
        self._groups.clear()
        self._seen.clear()
        self._lists.clear()

    def take(self, params: Sequence[Any]) -> None:
        """Copies what these parameters and their state are now."""
        seen, places = self._look(params)
        if places != self._places or len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._plan(params)
            self._seen, self._places = seen, places
        self._groups = [
            (group, name, group.get(name, _ABSENT), _copy(group.get(name, _ABSENT)))
            for group in self._optimizer.param_groups
            for name in self._group_state
        ]
        copy_lists(self._lists)

    def _look(self, params: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Every object that the plan is of, and where their memory is. Most steps find what the last one found, and plan nothing.

        A tensor that was given other memory is another one here. Where that is at the same address, :meth:`check` tells.
        """
        seen: list[Any] = []
        for p in params:
            state = self._optimizer.state.get(p)
            seen += (p, state is None)
            if state:
                seen += state.keys()
                seen += state.values()
        return seen, [address(value) for value in seen if isinstance(value, torch.Tensor)]

    def _plan(self, params: Sequence[Any]) -> None:
        """Finds the copies that are to be made, and a buffer for each."""
        self._seen = []  # it may end in an error
        before: dict[Any, dict[str, Any] | None] = {}
        pairs: list[tuple[Any, Any]] = []
        for p in params:
            state = self._optimizer.state.get(p)
            before[p] = None if state is None else dict(state)
            if self._names is None:
                pairs.append((self._buffer(p, _PARAMETER, p), local(p)))
            for name, value in (state or {}).items():
                if isinstance(value, torch.Tensor):
                    if reason := no_copy(value):
                        raise self._unknown(name, reason)
                    if self._names is None or name in self._names:
                        pairs.append((self._buffer(p, name, value), local(value)))
                elif not isinstance(value, _NUMBERS):
                    raise self._unknown(name, f"a {type(value).__name__}")
        self._before = before
        self._lists = lists_of(pairs)

    def made(self, p: Any) -> frozenset[str]:
        """Names of the state that the parameter has now and had not before."""
        return frozenset(self._optimizer.state.get(p) or ()) - frozenset(self._before[p] or ())

    def group_now(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self._group_state if name in group}

    def check(self, params: Iterable[Any]) -> None:
        """Raises if a copy does not fit any more where it came from: a copy between types rounds, and says nothing."""
        for to, buffer in self._copied(params):
            if reason := no_fit(to, buffer):
                raise ConfigError(
                    f"A parameter of {type(self._optimizer).__name__} or its state {reason}. Undo before the model or its "
                    "optimizer is made into another type or shape, or make it what it was at the step."
                )

    def put_back(self, params: Sequence[Any]) -> None:
        """What the step made is removed, what it changed and was copied is as it was."""
        pairs = [(local(to), buffer) for to, buffer in self._copied(params)]
        for p in params:
            before = self._before[p]
            if before is None:
                self._optimizer.state.pop(p, None)
                continue
            state = self._optimizer.state[p]
            for name in [name for name in state if name not in before]:
                del state[name]
            state.update(before)
        copy_lists(lists_of(pairs))

    def put_groups_back(self) -> None:
        for group, name, value, copy in self._groups:
            if value is _ABSENT:
                group.pop(name, None)
                continue
            if isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.copy_(copy)
            group[name] = value

    def _copied(self, params: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """What was copied, each with its copy."""
        for p in params:
            if self._names is None:
                yield p, self._buffers[p, _PARAMETER]
            for name, value in (self._before[p] or {}).items():
                if isinstance(value, torch.Tensor) and (self._names is None or name in self._names):
                    yield value, self._buffers[p, name]

    def _buffer(self, p: Any, name: str, like: Any) -> Any:
        like, buffer = local(like), self._buffers.get((p, name))
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (like.shape, like.dtype, like.device):
            # A buffer made in inference mode could be written to in that mode only.
            with torch.inference_mode(False):
                buffer = self._buffers[p, name] = torch.empty_like(like, requires_grad=False)
        return buffer

    def _unknown(self, name: str, what: str) -> Unsupported:
        return Unsupported(
            f"The state {name!r} of {type(self._optimizer).__name__} is {what}: Undo copies dense tensors, DTensors of them, and "
            "numbers. Save optimizer.state_dict() before the step instead."
        )


_ABSENT = object()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def lists_of(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[list[Any], list[Any]]]:
    """Where to copy and what, for each type and pair of devices: one call for all of them, which is one kernel on a GPU."""
    lists: dict[tuple[Any, Any, Any], tuple[list[Any], list[Any]]] = {}
    for to, source in pairs:
        tos, sources = lists.setdefault((to.dtype, to.device, source.device), ([], []))
        tos.append(to)
        sources.append(source)
    return list(lists.values())


# As floats a GPU would take them through float32, where a NaN loses its payload.
_SHORT = (torch.float16, torch.bfloat16)


def copy_lists(lists: Iterable[tuple[list[Any], list[Any]]]) -> None:
    # State that a step in inference mode made can be written to in that mode only.
    with torch.inference_mode():
        for tos, sources in lists:
            on_cpu = tos[0].device.type == sources[0].device.type == "cpu"
            if tos[0].dtype in _SHORT and not on_cpu:
                torch._foreach_copy_(_as_bits(tos), _as_bits(sources))
            else:
                torch._foreach_copy_(tos, sources)


def _as_bits(values: list[Any]) -> list[Any]:
    return [value.view(torch.int16) for value in values]
