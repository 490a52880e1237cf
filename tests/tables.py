"""Which cases of a table ``make test`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def most(cases: list[Any], rest: Iterable[Any]) -> list[Any]:
    """``cases`` always; those of ``rest`` in the long tables (``make tables``). One of several parameters is a tuple."""
    later = [case if isinstance(case, tuple) else (case,) for case in rest if case not in cases]
    return [*cases, *(pytest.param(*case, marks=pytest.mark.table) for case in later)]
