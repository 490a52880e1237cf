"""Under the policy replay: workers that end without leaving the job, and workers that go on after they have left it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launch.speaking import Replay, lines

ENDS = """
def missed(slot, slot_incarnation, evidence="robust-futex"):
    event("removed", slot=slot, slot_incarnation=slot_incarnation, evidence=evidence)
def exit_0():
    held = os.open(f"{os.environ['WORK']}/fifo0", os.O_WRONLY)  # whoever waits for the fifo waits for this one's end
    os._exit(0)
"""
WITHOUT_LEAVING = "rank 0 ended with exit code 0, but without leaving (for example by os._exit)"


def test_who_ends_with_0_without_leaving_is_started_again(replay: Replay) -> None:
    run = replay(
        ENDS
        + """
if rank == 0 and incarnation == 0: exit_0()
if rank == 1:
    wait("fifo0")
    missed(0, 0)
    wait("fifo1")
else:
    joined(0, 1)
    tell("fifo1")
me()
""",
        2,
        fifos=2,
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(line.split()[:3] for line in out.splitlines()) == [["0", "1", "0"], ["1", "0", "0"]]
    assert WITHOUT_LEAVING in err
    assert "it starts again, as after a failure" in err


def test_who_has_left_or_was_no_member_has_finished(replay: Replay, tmp_path: Path) -> None:
    run = replay(
        ENDS
        + """
if rank == 0:
    event("goodbye")
    exit_0()
if rank == 1:
    wait("fifo0")
    missed(0, 0)  # all the same
    missed(2, 0, "left")
    missed(3, 1)  # another one
    tell("fifo1")
    wait("fifo2")
if rank == 2 and incarnation == 0:
    wait("fifo1")
    sys.exit(1)
if rank == 2: joined(2, 1)
me()
""",
        4,
        fifos=3,
    )
    said = run.hear("rank 2 replays")  # the agent has read them all
    (tmp_path / "fifo2").write_text("go")
    code, out, err = run.finish()
    assert code == 0, [*said, err]
    assert sorted(line.split()[:2] for line in out.splitlines()) == [["1", "0"], ["2", "1"], ["3", "0"]]
    assert "without leaving" not in "".join(said) + err


def test_nothing_is_done_again_when_all_have_ended_with_0(replay: Replay, tmp_path: Path) -> None:
    """Rank 0's replacement has not come in when rank 1 has ended: there is nobody who would need it."""
    run = replay(
        ENDS
        + """
if incarnation:
    me()
    signal.pause()
if rank == 0: exit_0()
wait("fifo0")
missed(0, 0)
wait("fifo1")
""",
        2,
        fifos=2,
    )
    assert [rest[0] for rest in lines(run, 1).values()] == ["1"]
    (tmp_path / "fifo1").write_text("go")
    code, out, err = run.finish()
    assert (code, out) == (0, ""), err
    assert "slot 0: the replacement is ended: the others had finished before it came in" in err


def test_who_ends_so_each_time_is_taken_as_finished(replay: Replay, tmp_path: Path) -> None:
    run = replay(
        ENDS
        + """
if rank == 0: exit_0()
wait("fifo0")
missed(0, 0)
wait("fifo1")
""",
        2,
        "--max-restarts",
        "0",
        fifos=2,
    )
    run.hear("it has no restarts left, and is taken as finished")
    (tmp_path / "fifo1").write_text("go")
    code, _, err = run.finish()
    assert code == 0, err


@pytest.mark.table
def test_who_has_not_left_starts_with_the_next_generation(replay: Replay) -> None:
    run = replay(
        ENDS
        + """
if generation: me()
elif incarnation: signal.pause()
elif rank == 0: exit_0()
else:
    wait("fifo0")
    missed(0, 0)
    os.kill(os.getpid(), signal.SIGKILL)
""",
        2,
        fifos=1,
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted((line.split()[0], line.split()[4]) for line in out.splitlines()) == [("0", "-"), ("1", "-")]
    assert WITHOUT_LEAVING in err
    assert "ranks 0, 1 start again out of their logs (generation 1)" in err


LEFT = """
if generation == 0: event("goodbye")
if generation == 0 and rank == 1:
    wait("fifo0")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_who_has_left_works_on_while_the_next_generation_runs(replay: Replay, tmp_path: Path) -> None:
    """Rank 1 is killed while it writes its result: it has to do all again, without rank 0, which evaluates."""
    run = replay(
        LEFT
        + """
if rank == 0:
    tell("fifo0")
    wait("fifo1")
me()
""",
        2,
        fifos=2,
    )
    ((incarnation, generation, _, finished),) = lines(run, 1).values()
    assert (incarnation, generation, finished) == ("1", "1", "0")
    (tmp_path / "fifo1").write_text("go")
    code, out, err = run.finish()
    assert code == 0, err
    assert [line.split()[:3] for line in out.splitlines()] == [["0", "0", "0"]]
    assert "rank 1 starts again out of its log (generation 1); rank 0 had finished" in err


def test_who_fails_after_it_was_taken_as_finished_waits_for_another_generation(replay: Replay, tmp_path: Path) -> None:
    """Those of the present one do without it, and would not let it in."""
    run = replay(
        LEFT
        + """
me()
if generation == 0:
    tell("fifo0")
    wait("fifo1")
    sys.exit(1)
if rank == 1:
    tell("fifo1")
    wait("fifo2")
""",
        2,
        fifos=3,
    )
    run.hear("rank 0 died (exit code 1); the others wait")
    (tmp_path / "fifo2").write_text("go")
    code, out, err = run.finish()
    assert code == 0, err
    assert [[*line.split()[:3], line.split()[4]] for line in out.splitlines()] == [
        ["0", "0", "0", "-"],
        ["1", "1", "1", "0"],
        ["0", "1", "2", "1"],
    ]


FAILS = """
if rank == 0 and incarnation == 0:
    event("ending")
    tell("fifo0")
    END
if rank == 0: joined(0, 1)
else:
    wait("fifo0")
    missed(0, 0, "pidfd")
    event("suspected", slot=0, slot_incarnation=0, evidence="pidfd")
    wait("fifo1")
me()
"""


UNTIL_TOLD = """
    os.read(os.open(f"{os.environ['WORK']}/fifo2", os.O_RDONLY), 1)
    open(f"{os.environ['WORK']}/to its end", "w").close()
    sys.exit(3)
"""


def test_who_fails_ends_by_itself(replay: Replay, tmp_path: Path) -> None:
    """The others take it for dead before its process has ended: its exit code says of what it has failed."""
    run = replay(ENDS + FAILS.replace("    END", UNTIL_TOLD), 2, fifos=3)
    said = run.hear("rank 0 is gone")  # the agent has heard of it
    go = os.open(tmp_path / "fifo2", os.O_RDWR)  # which waits for nobody, should rank 0 be dead
    os.write(go, b"!")
    said += run.hear("rank 0 replays")
    (tmp_path / "fifo1").write_text("go")
    code, _, err = run.finish()
    os.close(go)
    assert code == 0, [*said, err]
    assert "exit code 3" in "".join(said)
    assert "SIGKILL" not in "".join(said)


def test_who_fails_and_does_not_end_is_killed(replay: Replay, tmp_path: Path) -> None:
    run = replay(ENDS + FAILS.replace("END", "signal.pause()"), 2, "--shutdown-timeout", "1", fifos=3)
    said = run.hear("rank 0 replays")
    (tmp_path / "fifo1").write_text("go")
    code, _, err = run.finish()
    assert code == 0, [*said, err]
    assert "rank 0 is killed: did not end by itself" in "".join(said)


def test_all_fail_and_do_not_end(replay: Replay) -> None:
    """Nobody is left who would take the others for dead."""
    run = replay(
        ENDS + "if generation == 0:\n    event('ending')\n    signal.pause()\nme()\n", 2, "--shutdown-timeout", "1"
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted((line.split()[0], line.split()[2]) for line in out.splitlines()) == [("0", "1"), ("1", "1")]


def test_one_of_a_group_that_fails_with_another_ends_by_itself(replay: Replay, tmp_path: Path) -> None:
    """Its group is taken along, and it is ending already."""
    script = """
if incarnation == 0 and rank < 2:
    event("started", log_group=[0, 1])
    event("ending")
    if rank == 0:
        wait("fifo0")
        sys.exit(3)
    tell("fifo0")
    UNTIL_TOLD
if rank == 2: wait("fifo1")
me()
"""
    run = replay(ENDS + script.replace("    UNTIL_TOLD", UNTIL_TOLD), 3, fifos=3)
    said = run.hear("rank 0 died (exit code 3)")
    go = os.open(tmp_path / "fifo2", os.O_RDWR)
    os.write(go, b"!")
    said += run.hear("rank 1 starts again with its log group")
    assert (tmp_path / "to its end").exists()
    (tmp_path / "fifo1").write_text("go")
    code, _, err = run.finish()
    os.close(go)
    assert code == 0, [*said, err]
