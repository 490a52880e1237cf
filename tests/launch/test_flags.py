"""Wrong flags are told once, by ftrun, before anything is started."""

from __future__ import annotations

import pytest
from launch.running import Start


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--policy", "wrong"), "policy='wrong' is not one of raise, lossy"),
        (("--heartbeat", "soon"), "FTCOMM_HEARTBEAT='soon' is not valid"),
        (("--faults", "rank=1,at=ring.rs.hopp,do=kill"), "near it: ring.rs.hop"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_flag(start: Start, flags: tuple[str, ...], words: str) -> None:
    code, _, err = start("raise SystemExit('started')", "--nproc-per-node", "2", *flags).finish()
    assert code == 2
    assert words in err
    assert "started" not in err
