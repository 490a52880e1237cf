"""Policy replay with log_mode="async": messages between hosts are logged after they were sent, and the output is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from harness import Context
from keeper import Keeper, faults
from kill_table import points, record
from test_checkpoints import digests, saving

import ftcomm

Keep = Callable[..., Keeper]
pytestmark = pytest.mark.usefixtures("pulls")
POINTS = ["late.queued", "late.write", "channel.piece", "channel.arrived", "log.header.before"]


def deaths(keep: Keep, undisturbed: Any, size: int, victims: set[int], point: str, transport: str) -> set[int]:
    """Who died; the output is that of a run that logs in the call."""
    wanted = undisturbed(size, programs.everything, transport)
    job = keep(
        size,
        programs.everything,
        transport=transport,
        log_mode="async",
        faults=faults(victims, point),
        heartbeat=2.0,
    )
    assert job.values(120) == wanted
    return {rank for rank, _ in job.deaths} if job.generation == 0 else victims


def check(keep: Keep, undisturbed: Any, size: int, victims: set[int], point: str, transport: str) -> None:
    assert deaths(keep, undisturbed, size, victims, point, transport) >= victims


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.sample(2)
def test_sender_dies_with_messages_that_are_not_logged(keep: Keep, undisturbed: Any, point: str) -> None:
    check(keep, undisturbed, 3, {1}, f"{point}:3", "tcp")


def test_sender_and_receiver_die(keep: Keep, undisturbed: Any) -> None:
    check(keep, undisturbed, 3, {1, 2}, "channel.piece:4", "tcp")


def test_all_die(keep: Keep, undisturbed: Any) -> None:
    check(keep, undisturbed, 3, {0, 1, 2}, "channel.arrived:4", "tcp")


def test_replacement_goes_on_from_a_checkpoint(keep: Keep, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    wanted = digests(keep(3, saving(tmp_path / "undisturbed"), transport="tcp").values())
    job = keep(3, saving(tmp_path, held={0, 1}), transport="tcp", log_mode="async")
    job.run_until(lambda: all(job.marked(rank, "half") for rank in range(3)))
    for victim in (0, 1):
        job.kill(victim)
    values = job.values()
    assert digests(values) == wanted
    assert values[1][1] <= 25, "it has begun at the top"


def test_buffer_is_the_callers_after_a_send(ranks: Any) -> None:
    """B: a large message leaves from the caller's buffer and is logged from there, and yet send may return only then."""

    def run(comm: Any, context: Context) -> bool:
        count = 300_000
        for step in range(20):
            x = np.full(count, step, np.float32)
            if comm.rank == 0:
                comm.ft_send(x, 1)
                request = comm.isend(x, 1)
                request.wait()
                x[:] = -1
            else:
                for _ in range(2):
                    comm.ft_recv(x, 0)
                    assert (x == step).all()
        comm.log_flush()
        return True

    assert ranks(2, run, policy="replay", transport="tcp", log_mode="async") == [True] * 2


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(ftcomm.ConfigError, match="sync, async"):
        ftcomm.Options(log_mode="later")


@pytest.mark.table
@pytest.mark.parametrize("transport", ["tcp", "hosts"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("point", points("late.", "channel.", "log.payload.", "log.header.", "log.watermark."))
@pytest.mark.parametrize("all_of_them", [False, True])
@pytest.mark.parametrize("nth", [2, 9])
def test_kill_at_the_log(
    keep: Keep, undisturbed: Any, transport: str, size: int, point: str, all_of_them: bool, nth: int
) -> None:
    if transport == "hosts" and size == 2:
        pytest.skip("two ranks on one host: nothing is late")
    at = f"{point}:{nth}"
    victims = set(range(size)) if all_of_them else {1}
    record(at, transport, bool(deaths(keep, undisturbed, size, victims, at, transport)))
