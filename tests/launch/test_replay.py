"""Under the policy replay ftrun brings back every slot, until one has failed too often.

The workers here only say what real ones would.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launch.running import Ftrun, wait_gone
from launch.speaking import Replay, lines

from ftcomm.exit_code import STARTS_AGAIN


def test_one_worker_is_replaced_alone(replay: Replay) -> None:
    run = replay(
        """
me()
if rank == 1 and incarnation == 0: os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    joined(1, 1)  # else its generation would be over with rank 0
    tell("fifo0")
else:
    wait("fifo0")
""",
        2,
        fifos=1,
    )
    first = sorted(line.split()[:3] for line in run.read_lines(3))
    assert first == [["0", "0", "0"], ["1", "0", "0"], ["1", "1", "0"]]
    code, _, err = run.finish()
    assert code == 0, err
    assert "rank 1 died (SIGKILL); the others wait" in err


def test_all_die_while_a_replacement_is_refused(
    replay: Replay, tmp_path: Path, no_processes: Callable[[int], None]
) -> None:
    """It comes with the next generation, whose own starts are refused, too, at first."""
    no_processes(5)
    run = replay(
        """
if incarnation == 0:
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    wait("fifo0")
    os.kill(os.getpid(), signal.SIGKILL)
me()
""",
        2,
        fifos=1,
    )
    run.hear("could not be started")
    (tmp_path / "fifo0").write_text("die")
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(line.split()[:2] for line in out.splitlines()) == [["0", "1"], ["1", "1"]], err
    assert "nobody is left to wait: ranks 0, 1 start again" in err


def test_a_set_of_strings_keeps_its_order(replay: Replay) -> None:
    run = replay(
        """
say(list({"these", "strings", "come", "in", "one", "order"}))
if incarnation < 2: sys.exit(1)
""",
        1,
    )
    assert len(set(run.read_lines(3))) == 1
    code, _, err = run.finish()
    assert code == 0, err


def test_a_stopped_worker_that_was_voted_out_is_killed(replay: Replay) -> None:
    run = replay(
        """
if rank == 1 and incarnation == 0:
    tell("fifo0")
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == 0:
    wait("fifo0")
    event("removed", slot=1, slot_incarnation=0, evidence="heartbeat", epoch=2)
    wait("fifo1")
else:
    joined(1, 1)
    tell("fifo1")
me()
""",
        2,
        fifos=2,
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(line.split()[:2] for line in out.splitlines()) == [["0", "0"], ["1", "1"]]
    assert "rank 1 was voted out by the others and still runs: it is killed" in err
    assert "rank 1 died (SIGKILL); the others wait" in err


@pytest.mark.table
def test_who_left_or_came_later_is_not_killed(replay: Replay, tmp_path: Path) -> None:
    run = replay(
        """
if rank == 1 and incarnation == 0: sys.exit(1)
if rank == 1:
    tell("fifo0")
    wait("fifo1")
else:
    wait("fifo0")
    event("removed", slot=1, slot_incarnation=0, evidence="heartbeat")  # of the one before
    event("removed", slot=1, slot_incarnation=1, evidence="left")
    event("removed", slot=0, slot_incarnation=0, evidence="heartbeat")  # nobody can say that of himself
    joined(1, 1)
    me()
    wait("fifo2")
""",
        2,
        fifos=3,
    )
    run.read_lines(1)
    said = run.hear("rank 1 replays")  # the agent has read them all
    for name in ("fifo1", "fifo2"):
        (tmp_path / name).write_text("go")
    code, _, err = run.finish()
    assert code == 0, [*said, err]
    assert "voted out" not in "".join(said) + err


def test_when_all_were_killed_all_start_again(replay: Replay) -> None:
    run = replay(
        """
me()
if generation < 2: signal.pause()
""",
        3,
    )
    for generation in range(2):
        for _, _, pid, _ in lines_of(run, 3, generation).values():
            os.kill(int(pid), signal.SIGKILL)
    last = lines_of(run, 3, 2)
    code, _, err = run.finish()
    assert code == 0, err
    assert set(last) == {0, 1, 2}
    assert "nobody is left to wait: ranks 0, 1, 2 start again out of their logs (generation 1)" in err
    assert "(generation 2)" in err


def lines_of(run: Ftrun, count: int, generation: int) -> dict[int, list[str]]:
    """The founders of a generation; a replacement of the one before may have spoken in between."""
    found: dict[int, list[str]] = {}
    while len(found) < count:
        found.update({rank: rest for rank, rest in lines(run, 1).items() if int(rest[1]) == generation})
    return found


@pytest.mark.table
def test_no_two_processes_of_a_slot_at_once(replay: Replay) -> None:
    """A replacement that nobody has admitted is dead and reaped before its slot starts again."""
    run = replay(
        """
if generation == 0 and rank == 0:
    wait("fifo0")
    os.kill(os.getpid(), signal.SIGKILL)
if generation == 0 and rank == 1 and incarnation == 0: sys.exit(1)
me()
if generation == 0:
    tell("fifo0")
    signal.pause()
""",
        2,
        fifos=1,
    )
    ((incarnation, generation, pid, _),) = lines(run, 1).values()
    assert (incarnation, generation) == ("1", "0")
    last = lines_of(run, 2, 1)
    with pytest.raises(ProcessLookupError):  # not a zombie either
        os.kill(int(pid), 0)
    assert {rank: rest[0] for rank, rest in last.items()} == {0: "1", 1: "2"}
    code, _, err = run.finish()
    assert code == 0, err
    assert "slot 1: replacement 1 started" in err


@pytest.mark.table
def test_an_admitted_replacement_is_a_member(replay: Replay) -> None:
    run = replay(
        """
if incarnation == 0 and rank == 1: sys.exit(1)
if rank == 1:
    joined(1, 1)
    tell("fifo0")
    wait("fifo1")
elif incarnation == 0:
    wait("fifo0")
    sys.exit(1)
else:
    joined(0, 1)  # else its generation would be over with rank 1
    tell("fifo1")
me()
""",
        2,
        fifos=2,
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(line.split()[:3] for line in out.splitlines()) == [["0", "1", "0"], ["1", "1", "0"]]
    assert "start again" not in err


def test_slots_that_have_finished_do_not_start_again(replay: Replay) -> None:
    run = replay(
        """
me()
if generation == 0 and rank == 1: signal.pause()
""",
        3,
    )
    pids = {rank: int(rest[2]) for rank, rest in lines(run, 3).items()}
    for rank in (0, 2):
        with contextlib.suppress(ProcessLookupError):  # it has ended and is reaped already
            wait_gone([os.pidfd_open(pids[rank])])
    os.kill(pids[1], signal.SIGKILL)
    code, out, err = run.finish()
    assert code == 0, err
    ((rank, incarnation, generation, _, finished),) = [line.split() for line in out.splitlines()]
    assert (rank, incarnation, generation, finished) == ("1", "1", "1", "0,2")
    assert "rank 1 starts again out of its log (generation 1); ranks 0, 2 had finished" in err


@pytest.mark.table
def test_a_start_that_fails_on_all_founders_is_made_again(replay: Replay) -> None:
    run = replay("me(); sys.exit(generation == 0)", 3)
    code, out, err = run.finish()
    assert code == 0, err
    assert {tuple(line.split()[i] for i in (0, 2)) for line in out.splitlines()} >= {("0", "1"), ("1", "1"), ("2", "1")}


def test_a_slot_that_fails_too_often_ends_the_job(replay: Replay) -> None:
    run = replay(
        """
me()
if rank == 1: sys.exit(7)
signal.pause()
""",
        3,
        "--max-restarts",
        "2",
    )
    code, out, err = run.finish()
    assert code == 1
    assert [line.split()[1] for line in out.splitlines() if line.startswith("1 ")] == ["0", "1", "2"]
    assert "slot 1 is given up: it failed 3 times (--max-restarts 2)." in err
    assert "Nobody can go on without it: ranks 0, 2 are ended." in err
    assert re.findall(r"rank (\d) failed for good: (.*)", err) == [("1", "exit code 7")]


@pytest.mark.table
def test_who_does_not_end_with_the_job_is_killed(replay: Replay) -> None:
    run = replay(
        """
if rank == 1:
    wait("fifo0")
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("fifo0")
while True: signal.pause()
""",
        2,
        "--max-restarts",
        "0",
        "--shutdown-timeout",
        "1",
        fifos=1,
    )
    code, _, err = run.finish()
    assert code == 1
    assert "rank 0 is killed: did not end in time" in err


@pytest.mark.table
def test_a_new_generation_costs_no_restart(replay: Replay) -> None:
    """Slot 1 is started three times again, once for the new generation's sake: two restarts are enough."""
    run = replay(
        """
if generation == 0 and rank == 0:
    wait("fifo0")
    os.kill(os.getpid(), signal.SIGKILL)
if generation == 0 and rank == 1 and incarnation == 0: sys.exit(1)
if generation == 0:
    tell("fifo0")
    signal.pause()
if rank == 1 and incarnation == 2: sys.exit(1)
if rank == 0: wait("fifo1")
else:
    joined(1, 3)
    tell("fifo1")
me()
""",
        2,
        "--max-restarts",
        "2",
        fifos=2,
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(line.split()[:3] for line in out.splitlines()) == [["0", "1", "1"], ["1", "3", "1"]]


@pytest.mark.table
def test_ctrl_c_starts_no_generation(replay: Replay) -> None:
    run = replay("me(); signal.pause()", 2)
    workers = [os.pidfd_open(int(rest[2])) for rest in lines(run, 2).values()]
    run.send(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 130, err
    wait_gone(workers)
    assert "start again" not in err


def test_a_log_group_starts_again_as_a_whole(replay: Replay) -> None:
    """Rank 0 fails; rank 1 of its group runs, and rank 3 has ended (or is about to): both start again, rank 2 does not."""
    run = replay(
        """
event("started", log_group=[2] if rank == 2 else [0, 1, 3])
me()
if rank == 2:
    for name in "fifo0", "fifo1", "fifo2": wait(name)
elif incarnation > 0:
    joined(rank, incarnation)
    tell({0: "fifo0", 1: "fifo1", 3: "fifo2"}[rank])
elif rank == 0:
    for name in "fifo3", "fifo4": wait(name)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    tell("fifo3" if rank == 1 else "fifo4")
    if rank == 1: signal.pause()
""",
        4,
        "--max-restarts",
        "1",
        fifos=5,
    )
    started = sorted(line.split()[:2] for line in run.read_lines(7))
    assert started == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"], ["2", "0"], ["3", "0"], ["3", "1"]]
    code, _, err = run.finish()
    assert code == 0, err
    assert "rank 1 starts again with its log group (ranks 0, 1, 3)" in err


def test_who_has_started_again_before_the_failure_is_seen_stays(replay: Replay) -> None:
    """Rank 0 has heard of rank 1's death, has ended and come back before rank 1 is reaped (its sockets close before it is)."""
    run = replay(
        f"""
event("started", log_group=[0, 1, 3])
me()
if rank == 0 and incarnation == 0: sys.exit({STARTS_AGAIN})
if rank == 2:
    for name in "fifo2", "fifo3": wait(name)
elif incarnation == 0 and rank == 1:
    for name in "fifo0", "fifo4": wait(name)
    os.kill(os.getpid(), signal.SIGKILL)
elif incarnation == 0:
    tell("fifo4")
    signal.pause()
else:
    joined(rank, incarnation)
    if rank == 0:
        tell("fifo0")
        wait("fifo1")
        tell("fifo2")
    else: tell("fifo1" if rank == 1 else "fifo3")
""",
        4,
        "--max-restarts",
        "1",
        fifos=5,
    )
    started = sorted(line.split()[:2] for line in run.read_lines(7))
    assert started == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"], ["2", "0"], ["3", "0"], ["3", "1"]]
    code, _, err = run.finish()
    assert code == 0, err
    assert "rank 1 starts again with its log group" not in err


def test_whoever_ends_for_its_log_group_has_not_failed(replay: Replay) -> None:
    run = replay(
        f"""
event("started", log_group=[0, 1])
if rank == 0 and incarnation < 3: sys.exit({STARTS_AGAIN})
if rank == 0:
    joined(0, incarnation)
    tell("fifo0")
else:
    wait("fifo0")
""",
        2,
        "--max-restarts",
        "0",
        fifos=1,
    )
    code, _, err = run.finish()
    assert code == 0, err
