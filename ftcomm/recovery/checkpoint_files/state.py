"""The state as it goes into a file: a copy of its containers, and a refusal of what plain torch would not read back."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ftcomm.errors import ConfigError

__all__ = ["check_state", "copied"]

_DEEPEST = 100  # containers in containers: pickle goes down by recursion, and so does this
_LONGEST_INT = 254 * 8  # bits; with more pickle takes an opcode that weights_only does not know
_READ = "torch.load(weights_only=True) reads tensors, numbers, strings, None, lists, tuples and dicts"
_PLAIN = (type(None), bool, float, complex, str, torch.dtype, torch.device, torch.Size)
_DICTS = (dict, collections.OrderedDict, collections.Counter)


def copied(state: Any, tensor: Callable[[Any, str], Any]) -> dict[Any, Any]:
    """A copy of the state's containers. What is in two places stays one thing in two places.

    Args:
        tensor: called for each tensor and its path; what it returns takes the tensor's place.

    Raises:
        ConfigError: it is no dict, or holds what could not be read back. The message says where.
    """
    if type(state) not in _DICTS:
        raise ConfigError(f"The state to save is a {_name(type(state))}; give a dict.")
    made: dict[Any, Any] = _Walk(tensor).copy(state, "", 0)
    return made


def check_state(state: Any) -> None:
    """Before there is anything to save.

    Raises:
        ConfigError: as :func:`copied`.
    """
    copied(state, lambda tensor, _path: tensor)


class _Walk:
    def __init__(self, tensor: Callable[[Any, str], Any]) -> None:
        self._tensor = tensor
        self._made: dict[int, Any] = {}  # by the id of what it was made of, which the state keeps alive

    def copy(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, np.generic):
            value = _plain_number(value)
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int or kind is bytes:
            return _checked(value, path)
        if id(value) in self._made:
            return self._made[id(value)]
        if depth > _DEEPEST:
            raise ConfigError(f"The state is nested more than {_DEEPEST} deep at {path}. Make it flatter.")
        if kind in (torch.Tensor, torch.nn.Parameter):
            made = self._tensor(value, path)
        elif kind in _DICTS:
            return self._dict(value, path, depth)
        elif kind is list:
            self._made[id(value)] = made = []  # before what is in it, which may be itself
            made += [self.copy(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
        elif kind is tuple:
            made = tuple(self.copy(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value))
        else:
            raise ConfigError(f"The state can't be saved: {path} is a {_name(kind)}, and {_READ}. {_advice(value)}")
        self._made[id(value)] = made
        return made

    def _dict(self, value: Any, path: str, depth: int) -> Any:
        made = self._made[id(value)] = type(value)()
        for key, item in value.items():
            _check_key(key, path)
            made[key] = self.copy(item, _below(path, key), depth + 1)
        if isinstance(value, collections.OrderedDict):  # a module's state_dict() has its versions there
            for name, item in vars(value).items():
                setattr(made, name, self.copy(item, f"{path}.{name}", depth + 1))
        return made


def _plain_number(value: Any) -> Any:
    """NumPy's numbers as Python's: a schedule that is computed with NumPy makes such a learning rate."""
    number = value.item() if value.dtype.kind in "biufc" else value
    return number if type(number) in (bool, int, float, complex) else value  # none has room for a longdouble


def _below(path: str, key: Any) -> str:
    return key if not path and isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def _checked(value: Any, path: str) -> Any:
    if isinstance(value, int) and value.bit_length() > _LONGEST_INT:
        raise ConfigError(
            f"The state can't be saved: {path} is an int of {value.bit_length()} bits, and torch.load(weights_only=True) reads "
            f"{_LONGEST_INT} at most. Save it as a string."
        )
    if value == b"":
        raise ConfigError(
            f"The state can't be saved: {path} is an empty bytes object, which torch.load(weights_only=True) does not read. "
            "Save None instead."
        )
    return value


def _check_key(key: Any, path: str) -> None:
    for part in key if type(key) is tuple else (key,):
        if type(part) not in (*_PLAIN, int, bytes):
            raise ConfigError(
                f"The state can't be saved: a key of {path or 'the state'} is a {_name(type(part))}: {_short(key)}. Take strings "
                "or numbers for keys."
            )
        if type(part) in (int, bytes):
            _checked(part, f"a key of {path or 'the state'}")


def _advice(value: Any) -> str:
    """What to save in its place."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return "Save the plain tensor in it: to_local() or full_tensor() of a DTensor, as_subclass(torch.Tensor) of others."
    if kind.__module__.partition(".")[0] == "numpy":
        return "Save torch.from_numpy() of an array, item() of a number."
    if isinstance(value, enum.Enum):
        return "Save its value."
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)):
        return "Code is not state: leave it out and put it back after loading."
    if callable(getattr(value, "state_dict", None)):
        return "Save its state_dict()."
    if dataclasses.is_dataclass(value):
        return "Save dataclasses.asdict() of it."
    for plain in (dict, tuple, str, int, float):
        if isinstance(value, plain):
            return f"Save {plain.__name__}() of it."
    if isinstance(value, (set, frozenset)):
        return "Save sorted() of it."
    if isinstance(value, (bytearray, memoryview)):
        return "Save bytes() of it."
    return "Save what it holds in these, or leave it out."


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
