"""A store as the ``ft_store`` of the C interface: membership cells of jobs that span hosts."""

from __future__ import annotations

from typing import Any

from ftcomm._lib import lib
from ftcomm.stores import Store

__all__ = ["StoreCallbacks"]


class StoreCallbacks:
    """Keeps the C callbacks alive. An exception of the store becomes -1, which the library takes as "unknown outcome"."""

    def __init__(self, store: Store) -> None:
        ffi, _ = lib()
        self._store = store
        self._get = ffi.callback("int64_t(void*, const char*, uint8_t*, size_t)", self.get, error=-1, onerror=_quiet)
        self._compare_set = ffi.callback(
            "int64_t(void*, const char*, const uint8_t*, size_t, const uint8_t*, size_t, uint8_t*, size_t)",
            self.compare_set,
            error=-1,
            onerror=_quiet,
        )
        self.struct = ffi.new("ft_store*", {"get": self._get, "compare_set": self._compare_set})

    def get(self, _context: Any, key: Any, out: Any, cap: int) -> int:
        ffi, _ = lib()
        return self._give(self._store.get(ffi.string(key).decode()) or b"", out, cap)

    def compare_set(
        self,
        _context: Any,
        key: Any,
        expected: Any,
        expected_len: int,
        desired: Any,
        desired_len: int,
        out: Any,
        cap: int,
    ) -> int:
        ffi, _ = lib()
        before = bytes(ffi.buffer(expected, expected_len)) if expected_len else b""
        after = bytes(ffi.buffer(desired, desired_len)) if desired_len else b""
        return self._give(self._store.compare_set(ffi.string(key).decode(), before, after), out, cap)

    @staticmethod
    def _give(value: bytes, out: Any, cap: int) -> int:
        if len(value) > cap:
            return -1
        lib()[0].memmove(out, value, len(value))
        return len(value)


def _quiet(_type: Any, _error: Any, _traceback: Any) -> None:
    """The native side reports a lost store (NoAuthority); a traceback on stderr for each retry would only hide that."""
