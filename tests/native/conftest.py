from __future__ import annotations

from collections.abc import Iterator

import native_ranks as nr
import pytest


@pytest.fixture
def ranks() -> Iterator[nr.Ranks]:
    made = nr.Ranks()
    yield made
    made.close()
