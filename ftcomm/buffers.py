"""What the direct API accepts as a buffer: NumPy arrays, torch CPU tensors, anything with the buffer protocol.

Neither NumPy nor torch is imported here: an object of theirs can only exist where its module is loaded already.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ftcomm._calls import introduce
from ftcomm._lib import lib
from ftcomm.dtypes import DTYPES, dtype_name, dtype_number, dtype_size
from ftcomm.errors import ConfigError

__all__ = ["ARRAY_TYPES", "Buffer", "buffer_of"]

# struct's letters with their size here (native 'l' has 8 bytes); complex is NumPy's 'Z' prefix.
_FORMATS = {
    "d": "float64", "f": "float32", "e": "float16", "?": "bool", "Zf": "complex64", "Zd": "complex128",
    "b": "int8", "h": "int16", "i": "int32", "q": "int64", "l": "int64", "n": "int64",
    "B": "uint8", "c": "uint8", "H": "uint16", "I": "uint32", "Q": "uint64", "L": "uint64", "N": "uint64",
}  # fmt: skip
# Of NumPy's arrays, by the letters of their memoryviews.
ARRAY_TYPES = {letter: DTYPES[name] for letter, name in _FORMATS.items()}
_BUFFER_KINDS = "biufc"  # NumPy's own types; those of ml_dtypes have no buffer protocol
_NATIVE_ORDER = "<" if sys.byteorder == "little" else ">"


@dataclass(slots=True)  # and not frozen, which takes a microsecond
class Buffer:
    """A checked buffer: where it is, how many elements, of which type, and what keeps it alive."""

    pointer: Any
    count: int
    dtype: int
    keep: Any

    @property
    def nbytes(self) -> int:
        return self.count * dtype_size(self.dtype)


def buffer_of(thing: Any, *, what: str = "buffer", writable: bool, dtype: Any = None) -> Buffer:
    """Checks ``thing`` and finds its memory. ``dtype`` says what raw bytes hold where the object itself can't."""
    introduce(type(thing))
    override = None if dtype is None else dtype_number(dtype)
    numpy: Any = sys.modules.get("numpy")
    if override is None and numpy is not None and type(thing) is numpy.ndarray and _is_plain(thing, writable):
        number = dtype_number(thing.dtype)
        return Buffer(lib()[0].from_buffer(thing), thing.size, number, thing)
    found = _torch(thing, what, override) or _numpy(thing, what, writable, override)
    return found or _protocol(thing, what, writable, override)


def _is_plain(array: Any, writable: bool) -> bool:
    """Nothing to complain of. (All but one of its kinds: who complains looks again, at 4 us for the array interface.)"""
    flags = array.flags
    return (
        flags.c_contiguous
        and (flags.writeable or not writable)
        and array.dtype.isnative
        and array.dtype.kind in _BUFFER_KINDS
    )


def _torch(thing: Any, what: str, override: int | None) -> Buffer | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(thing, torch.Tensor):
        return None
    if thing.layout != torch.strided:
        raise ConfigError(
            f"The {what} is a sparse tensor ({thing.layout}). Pass tensor.to_dense(), or its values() and indices()."
        )
    if thing.device.type != "cpu":
        raise ConfigError(
            f"The {what} is on device {thing.device}. The direct API takes CPU tensors: pass tensor.cpu(), or use "
            "torch.distributed with backend='ftcomm'."
        )
    if not thing.is_contiguous():
        raise ConfigError(
            f"The {what} is not contiguous (shape {tuple(thing.shape)}, strides {thing.stride()}). Pass tensor.contiguous()."
        )
    if thing.is_conj() or thing.is_neg():
        raise ConfigError(f"The {what} is a lazy conjugate or negative view. Pass tensor.resolve_conj().resolve_neg().")
    size = thing.element_size() * thing.numel()
    own = None if override is not None else dtype_number(thing.dtype)
    return _build(thing.data_ptr(), size, own, override, what, thing)


def _numpy(thing: Any, what: str, writable: bool, override: int | None) -> Buffer | None:
    interface = getattr(thing, "__array_interface__", None)
    if not isinstance(interface, dict):
        return None
    address, readonly = interface["data"]
    if not thing.flags.c_contiguous:
        raise ConfigError(
            f"The {what} is not contiguous (shape {thing.shape}, strides {thing.strides}). Pass numpy.ascontiguousarray(array)."
        )
    if writable and readonly:
        raise ConfigError(f"The {what} is read-only, and the result is written into it. Pass array.copy().")
    if interface["typestr"][0] not in ("|", _NATIVE_ORDER):
        raise ConfigError(
            f"The {what} has foreign byte order ({interface['typestr']}). Pass array.astype(array.dtype.newbyteorder('='))."
        )
    own = None if override is not None else dtype_number(thing.dtype)
    return _build(address, thing.nbytes, own, override, what, thing)


def _protocol(thing: Any, what: str, writable: bool, override: int | None) -> Buffer:
    try:
        view = memoryview(thing)
    except TypeError:
        raise ConfigError(
            f"The {what} is a {type(thing).__name__}, which has no memory to work on. Pass a NumPy array, a torch CPU tensor "
            "or an object with the buffer protocol (bytearray, array.array, memoryview)."
        ) from None
    if not view.c_contiguous:
        raise ConfigError(f"The {what} is not contiguous (strides {view.strides}). Pass a contiguous copy.")
    if writable and view.readonly:
        raise ConfigError(
            f"The {what} is read-only ({type(thing).__name__}), and the result is written into it. Pass a bytearray."
        )
    own = None if override is not None else _dtype_of_format(view, what)
    ffi, _ = lib()
    memory = ffi.from_buffer("char[]", thing, require_writable=writable)
    return _build(int(ffi.cast("uintptr_t", memory)), view.nbytes, own, override, what, (thing, memory))


def _dtype_of_format(view: memoryview, what: str) -> int:
    name = _FORMATS.get(view.format.lstrip("@=" + _NATIVE_ORDER))
    if name is None or dtype_size(DTYPES[name]) != view.itemsize:
        raise ConfigError(
            f"The {what} has elements of format {view.format!r}, which is not supported. Say with dtype= what they are."
        )
    return DTYPES[name]


def _build(address: int, nbytes: int, own: int | None, override: int | None, what: str, keep: Any) -> Buffer:
    number = own if override is None else override
    assert number is not None
    size = dtype_size(number)
    if nbytes % size != 0:
        raise ConfigError(
            f"The {what} has {nbytes} bytes, which is no multiple of the {size} bytes of a {dtype_name(number)}."
        )
    ffi, _ = lib()
    return Buffer(ffi.cast("void*", address), nbytes // size, number, keep)
