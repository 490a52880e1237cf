"""Several nodes: each ftrun knows how the others' workers ended, and stays for them where they need it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launch.running import Ftrun, Start, start_two
from launch.speaking import WORKER

from ftcomm.launch import nodes

WAITS = """
import os
print(os.getpid(), flush=True)
open(os.environ["WORK"] + "/go" + os.environ["GROUP_RANK"]).read()
if os.path.exists(os.environ["WORK"] + "/fail" + os.environ["GROUP_RANK"]): raise SystemExit(3)
"""


@pytest.fixture
def two(start: Start, tmp_path: Path) -> list[Ftrun]:
    """Of a worker each; the first has the store. A worker ends when its fifo is opened."""
    return waiting(start, tmp_path)


def waiting(start: Start, tmp_path: Path, *more: str) -> list[Ftrun]:
    for node in range(2):
        os.mkfifo(tmp_path / f"go{node}")
    ftruns = start_two(start, WAITS, "--max-restarts", "0", *more)
    for one in ftruns:
        one.read_lines(1)
    return ftruns


def let_end(folder: Path, node: int) -> None:
    with open(folder / f"go{node}", "w"):
        pass


@pytest.mark.parametrize("fails", [0, 1])
def test_a_job_in_which_one_node_has_failed_is_no_success(two: list[Ftrun], tmp_path: Path, fails: int) -> None:
    (tmp_path / f"fail{fails}").touch()
    for node in range(2):
        let_end(tmp_path, node)
    ended = [one.finish() for one in two]
    assert [code for code, _, _ in ended] == [1, 1], ended
    assert f"this node's workers succeeded, but a worker of node {fails} failed for good" in ended[1 - fails][2]
    assert "all workers succeeded" not in ended[0][2] + ended[1][2]


@pytest.mark.parametrize("fails", [0, 1])
def test_under_replay_the_other_nodes_end_too(
    monkeypatch: pytest.MonkeyPatch, start: Start, tmp_path: Path, fails: int
) -> None:
    """They would wait for ranks that don't come back."""
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    two = waiting(start, tmp_path, "--policy", "replay")
    (tmp_path / f"fail{fails}").touch()
    let_end(tmp_path, fails)
    ended = [one.finish() for one in two]
    assert [code for code, _, _ in ended] == [1, 1], ended
    assert f"slot {fails} is given up" in ended[fails][2]
    said = f"a worker of node {fails} failed for good. Nobody can go on without it: rank {1 - fails} is ended."
    assert said in ended[1 - fails][2]
    assert f"rank {1 - fails} was ended: nobody could go on without the other node" in ended[1 - fails][2]
    assert f"rank {1 - fails} failed for good" not in ended[1 - fails][2]


def test_all_succeed(two: list[Ftrun], tmp_path: Path) -> None:
    let_end(tmp_path, 0)
    two[0].hear("waiting for the other nodes")
    let_end(tmp_path, 1)
    ended = [one.finish() for one in two]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert all("all workers succeeded" in err for _, _, err in ended)


def test_who_has_died_without_a_word_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    monkeypatch.setattr(nodes, "GONE", 2.0)
    two: list[Ftrun] = request.getfixturevalue("two")
    let_end(tmp_path, 0)
    two[0].hear("waiting for the other nodes")
    two[1].send(signal.SIGKILL)
    code, _, err = two[0].finish()
    assert code == 1, err
    assert "node 1 is gone, and its ftrun with it" in err


def test_a_node_that_goes_waits_for_the_others_only_where_the_store_is(two: list[Ftrun], tmp_path: Path) -> None:
    two[1].send(signal.SIGTERM)
    code, _, err = two[1].finish()
    assert code == 143, err
    assert "waiting for the other nodes" not in err
    let_end(tmp_path, 0)
    code, _, err = two[0].finish()
    assert code == 0, err


@pytest.mark.parametrize("policy", ["lossy", "replay"])
def test_the_others_are_told_that_a_node_was_told_to_go(
    monkeypatch: pytest.MonkeyPatch, start: Start, tmp_path: Path, policy: str
) -> None:
    """Nobody starts its ranks again, and under replay the others wait for them."""
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    two = waiting(start, tmp_path, "--policy", policy)
    two[1].send(signal.SIGTERM)
    assert two[1].finish()[0] == 143
    (line,) = two[0].hear("node 1 was told to go")[-1:]
    assert "(SIGTERM): its ranks are not started again" in line
    assert ("wait for them until their timeout" in line) == (policy == "replay")
    let_end(tmp_path, 0)
    assert two[0].finish()[0] == 0


def test_the_one_with_the_store_stays(two: list[Ftrun], tmp_path: Path) -> None:
    two[0].send(signal.SIGTERM)
    two[0].hear("waiting for the other nodes")
    let_end(tmp_path, 1)
    code, _, err = two[1].finish()
    assert code == 0, err
    code, _, err = two[0].finish()
    assert code == 143, err


def test_told_to_go_while_it_waits_it_stays(two: list[Ftrun], tmp_path: Path) -> None:
    let_end(tmp_path, 0)
    two[0].hear("waiting for the other nodes")
    two[0].send(signal.SIGTERM)
    let_end(tmp_path, 1)
    code, _, err = two[1].finish()
    assert code == 0, err
    assert "all workers succeeded" in err
    assert two[0].finish()[0] == 143


def test_without_the_store_nothing_is_known_of_the_others(two: list[Ftrun], tmp_path: Path) -> None:
    two[0].send(signal.SIGKILL)
    two[0].finish()
    let_end(tmp_path, 1)
    code, _, err = two[1].finish()
    assert code == 1, err
    assert "nothing is known of node 0: the rendezvous store is gone" in err


SPEAKS = WORKER + 'event("started")\nsay(os.getpid())\n'


@pytest.mark.parametrize("policy", ["lossy", "replay"])
def test_without_the_store_no_replacement_waits_to_be_let_in(
    monkeypatch: pytest.MonkeyPatch, start: Start, policy: str
) -> None:
    """It would come in through the store."""
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    two = start_two(start, SPEAKS + "signal.pause()\n", "--policy", policy)
    pids = [int(one.read_lines(1)[0]) for one in two]
    two[0].send(signal.SIGKILL)
    two[0].finish()
    os.kill(pids[1], signal.SIGUSR1)
    code, _, err = two[1].finish()
    assert code == 1, err
    assert "rank 1 failed for good: killed by SIGUSR1" in err
    if policy == "lossy":
        assert "the job's store, through which it would come in, is gone. Start the job again" in err
    else:
        assert "the rendezvous store is gone. Nobody can go on without it" in err


WORKS_ON = """
event("goodbye")
if rank == 1: os.read(os.open(f"{os.environ['WORK']}/fifo", os.O_RDONLY), 1)
print("done", flush=True)
"""


def test_who_has_left_works_on_without_the_store(monkeypatch: pytest.MonkeyPatch, start: Start, tmp_path: Path) -> None:
    """For itself: it needs nobody."""
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    os.mkfifo(tmp_path / "fifo")
    go = os.open(tmp_path / "fifo", os.O_RDWR)  # which waits for nobody, should rank 1 be dead
    two = start_two(start, SPEAKS + WORKS_ON, "--policy", "replay", "--pair-log", str(tmp_path))
    assert two[0].read_lines(2)[1] == "done"
    two[1].read_lines(1)
    two[0].hear("waiting for the other nodes")
    two[0].send(signal.SIGINT)
    two[0].finish()
    os.write(go, b"!")
    _, out, err = two[1].finish()
    os.close(go)
    assert out == "done\n", err


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who is silent is taken for gone: who waits for that hangs."""
    monkeypatch.setattr(nodes, "GONE", 1000.0)


@pytest.mark.usefixtures("patient")
def test_ctrl_c_does_not_wait(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Nor is such a node waited for."""
    two: list[Ftrun] = request.getfixturevalue("two")
    let_end(tmp_path, 1)
    two[1].hear("waiting for the other nodes")
    two[1].send(signal.SIGINT)
    assert two[1].finish()[0] == 130
    let_end(tmp_path, 0)
    assert two[0].finish()[0] == 0


@pytest.mark.usefixtures("patient")
def test_a_node_that_was_interrupted_is_not_waited_for(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    two: list[Ftrun] = request.getfixturevalue("two")
    two[1].send(signal.SIGINT)
    assert two[1].finish()[0] == 130
    let_end(tmp_path, 0)
    code, _, err = two[0].finish()
    assert code == 1, err
    assert "this node's workers succeeded, but node 1 was interrupted" in err


@pytest.mark.usefixtures("patient")
def test_under_replay_a_node_that_was_interrupted_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, start: Start, tmp_path: Path
) -> None:
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    two = waiting(start, tmp_path, "--policy", "replay")
    two[1].send(signal.SIGINT)
    assert two[1].finish()[0] == 130
    code, _, err = two[0].finish()
    assert code == 1, err
    assert "node 1 was interrupted. Nobody can go on without it: rank 0 is ended." in err
