#!/usr/bin/env bash
# What the build needs and pip can't bring: named before anything is started.
set -euo pipefail

python=${1:-python3}
cxx=${CXX:-c++}
missing=()

if ! command -v "$python" >/dev/null; then
    missing+=("Python 3.10 or newer as '$python': apt-get install python3 python3-venv (or make PYTHON=/path/to/python)")
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    missing+=("Python 3.10 or newer; '$python' is $("$python" -V): make PYTHON=/path/to/a/newer/python")
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    missing+=("the venv module of Python: apt-get install python3-venv")
elif ! "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; then
    missing+=("Python's C headers (for the compiled parts): apt-get install python3-dev")
fi

if ! command -v "$cxx" >/dev/null; then
    missing+=("a C++20 compiler: apt-get install g++ (11 or newer)")
elif ! printf '#include <bit>\n#include <span>\nconstexpr int n = std::popcount(7u);\nint main() { return n - 3; }\n' |
    "$cxx" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
    missing+=("a compiler that knows C++20; '$cxx' does not: apt-get install g++-11 or newer, then make CXX=g++-11")
fi

if [ "$(uname -s)" != Linux ]; then
    missing+=("Linux: the library uses memfd, futexes and epoll")
fi

if [ ${#missing[@]} -gt 0 ]; then
    echo "This machine lacks:" >&2
    printf '  - %s\n' "${missing[@]}" >&2
    exit 1
fi
