"""What is accepted as a buffer, and what each refusal says."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import numpy as np
import pytest

from ftcomm import ConfigError
from ftcomm._lib import lib
from ftcomm.buffers import buffer_of
from ftcomm.dtypes import DTYPES, OPS, dtype_number, op_number


def address(thing: Any, **more: Any) -> int:
    return int(lib()[0].cast("uintptr_t", buffer_of(thing, writable=False, **more).pointer))


@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith(("bfloat", "float8"))])
def test_numpy(name: str) -> None:
    data = np.zeros((2, 3), dtype=name)
    found = buffer_of(data, writable=True)
    assert (found.count, found.dtype, found.nbytes) == (6, DTYPES[name], data.nbytes)
    assert address(data) == data.ctypes.data


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numpy_types_of_ml_dtypes(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = buffer_of(np.zeros(5, dtype=getattr(ml_dtypes, name)), writable=True)
    assert (found.count, found.dtype) == (5, DTYPES[name])


@pytest.mark.parametrize("name", [*DTYPES])
def test_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    data = torch.zeros(2, 3, dtype=getattr(torch, name))
    found = buffer_of(data, writable=True)
    assert (found.count, found.dtype) == (6, DTYPES[name])
    assert address(data) == data.data_ptr()


@pytest.mark.parametrize(
    ("thing", "name", "count"),
    [
        (bytearray(8), "uint8", 8),
        (array.array("d", [1, 2]), "float64", 2),
        (array.array("l", [1, 2]), "int64", 2),
        (memoryview(bytearray(8)).cast("i"), "int32", 2),
        ((ctypes.c_float * 3)(), "float32", 3),
        (b"read", "uint8", 4),
    ],
)
def test_buffer_protocol(thing: Any, name: str, count: int) -> None:
    found = buffer_of(thing, writable=False)
    assert (found.count, found.dtype) == (count, DTYPES[name])


def test_dtype_says_what_bytes_hold() -> None:
    found = buffer_of(bytearray(8), writable=True, dtype="bfloat16")
    assert (found.count, found.dtype) == (4, DTYPES["bfloat16"])
    assert buffer_of(np.zeros(4, np.uint16), writable=True, dtype=np.float16).dtype == DTYPES["float16"]
    with pytest.raises(ConfigError, match="no multiple of the 2 bytes"):
        buffer_of(bytearray(7), writable=True, dtype="bfloat16")


def test_empty_and_scalar() -> None:
    assert buffer_of(np.zeros(0, np.float32), writable=True).count == 0
    assert buffer_of(bytearray(), writable=True).count == 0
    assert buffer_of(np.array(1.0), writable=True).count == 1


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (np.zeros((4, 4))[:, 1], "ascontiguousarray"),
        (np.asfortranarray(np.zeros((2, 3))), "ascontiguousarray"),
        (np.zeros(2, ">f4"), "byte order"),
        (np.zeros(2, "U3"), "not supported"),
        (np.zeros(2, "datetime64[s]"), "not supported"),
        (np.zeros(2, object), "not supported"),
        (np.frombuffer(b"12345678", np.float32), r"read-only.*copy"),
        (b"1234", "read-only"),
        (memoryview(bytearray(8))[::2], "not contiguous"),
        ([1.0, 2.0], "a list"),
        (3.0, "a float"),
        (None, "a NoneType"),
    ],
)
def test_refused(thing: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        buffer_of(thing, writable=True)


def test_refused_dtype() -> None:
    with pytest.raises(ConfigError, match="not supported"):
        buffer_of(bytearray(8), writable=True, dtype=["float32"])


def test_refused_tensors() -> None:
    torch = pytest.importorskip("torch")
    for thing, says in [
        (torch.zeros(4, 4).t()[:, 1:], r"contiguous\(\)"),
        (torch.eye(3).to_sparse(), r"to_dense"),
        (torch.zeros(3, device="meta"), r"cpu\(\)"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "resolve_conj"),
    ]:
        with pytest.raises(ConfigError, match=says):
            buffer_of(thing, writable=True)


def test_names() -> None:
    assert (
        dtype_number("torch.float32") == dtype_number(np.float32) == dtype_number(np.dtype("f4")) == DTYPES["float32"]
    )
    assert op_number("SUM") == op_number("sum") == OPS["sum"]
    assert op_number("prod") == OPS["product"]
    with pytest.raises(ConfigError, match="premul_sum"):
        op_number("median")
    with pytest.raises(ConfigError, match="float64"):
        dtype_number("float128")
