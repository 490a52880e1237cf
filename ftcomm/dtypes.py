"""Element types and reduction operators: names, sizes and their numbers in the C interface."""

from __future__ import annotations

import functools
from typing import Any

from ftcomm.errors import ConfigError

__all__ = ["DTYPES", "OPS", "OP_NUMBERS", "dtype_name", "dtype_number", "op_number"]

_NAMES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "bool", "complex64", "complex128",
)  # fmt: skip
_SIZES = (8, 4, 2, 2, 1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16)

DTYPES = {name: number for number, name in enumerate(_NAMES)}
OPS = {
    name: number
    for number, name in enumerate(("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"))
}
_OP_ALIASES = {"prod": "product", "mean": "avg", "average": "avg"}
OP_NUMBERS = OPS | {alias: OPS[name] for alias, name in _OP_ALIASES.items()}
_DTYPE_ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "bool_": "bool",
    "float8_e4m3": "float8_e4m3fn",
}


def dtype_number(dtype: Any) -> int:
    """The number of a dtype given as a name, a NumPy dtype or type, or a torch dtype."""
    try:
        return _number(dtype)
    except TypeError:  # not hashable: none of these
        return _number.__wrapped__(dtype)


@functools.lru_cache(maxsize=256)
def _number(dtype: Any) -> int:
    name = dtype if isinstance(dtype, str) else _name_of(dtype)
    name = name.removeprefix("torch.")
    number = DTYPES.get(_DTYPE_ALIASES.get(name, name))
    if number is None:
        raise ConfigError(f"dtype {name!r} is not supported. Use one of {', '.join(DTYPES)}.")
    return number


def _name_of(dtype: Any) -> str:
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return name if isinstance(name, str) else str(dtype)


def dtype_name(number: int) -> str:
    return _NAMES[number]


def dtype_size(number: int) -> int:
    """Bytes of an element."""
    return _SIZES[number]


def op_number(op: Any) -> int:
    """The number of an operator given by name, or as torch's ``ReduceOp``."""
    name = str(op if isinstance(op, str) else getattr(op, "name", op)).rsplit(".", 1)[-1].lower()
    number = OP_NUMBERS.get(name)
    if number is None:
        raise ConfigError(f"op {op!r} is not known. Use one of {', '.join(OPS)}.")
    return number
