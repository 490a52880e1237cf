"""Writes the Python module that binds libftcomm.so: python scripts/make_abi.py ftcomm.h abi.py (the build calls it).

cffi's out-of-line ABI mode. Parsing C in every process would cost 80 ms at import and about 1 ms at the first use of each type,
much of that in the middle of a recovery.
"""

import re
import sys
from pathlib import Path

import cffi


def declarations(header: str) -> str:
    """What cffi can parse of the C header: no preprocessor lines, no comments, no export macro, no C++ guard."""
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\s*#.*$", " ", text, flags=re.MULTILINE)
    return re.sub(r"\bFT_API\b", " ", text)


def main(header: str, module: str) -> None:
    ffi = cffi.FFI()
    ffi.cdef(declarations(Path(header).read_text(encoding="utf-8")))
    ffi.set_source("abi", None)
    ffi.emit_python_code(module)


if __name__ == "__main__":
    main(*sys.argv[1:])
