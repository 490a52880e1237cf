"""When the workers of several nodes start again together, step by step; and with ftruns and workers that are killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from launch.running import PATIENCE, Ftrun, Start, start_two
from launch.speaking import WORKER
from torch.distributed import HashStore

from ftcomm.launch import nodes
from ftcomm.launch.board import Board
from ftcomm.launch.generations import Generations, Has
from ftcomm.launch.replay import ReplayAgent

RING = Path(__file__).parents[2] / "examples" / "ring_replay.py"
Two = Callable[..., list[Ftrun]]
NOBODY: frozenset[int] = frozenset()


def some(count: int) -> list[Generations]:
    store = HashStore()
    return [Generations(Board(store), node, count) for node in range(count)]


def look(all_of_them: list[Generations], finished: frozenset[int] = NOBODY, lost: frozenset[int] = NOBODY) -> None:
    """Twice: what a node says is for the others' next look."""
    for _ in range(2):
        for one in all_of_them:
            one.look(finished, lost)


def test_nobody_stops_while_one_has_a_member() -> None:
    a, b, c = three = some(3)
    a.tell(Has.NONE)
    b.tell(Has.NONE)
    look(three)
    assert not any(one.must_stop for one in three)
    b.tell(Has.MEMBERS)  # a replacement was let in
    c.tell(Has.NONE)
    look(three)
    assert not any(one.must_stop for one in three)
    b.tell(Has.NONE)
    look(three)
    assert all(one.must_stop for one in three)


def test_nobody_stops_if_a_replacement_comes_in_during_the_look() -> None:
    class Slow(HashStore):  # type: ignore[misc]
        def check(self, keys: list[str]) -> bool:
            a.tell(Has.MEMBERS)
            return bool(super().check(keys))

    store = Slow()
    a, b = Generations(Board(store), 0, 2), Generations(Board(store), 1, 2)
    b.tell(Has.DONE)
    b.look(NOBODY, NOBODY)
    a.tell(Has.NONE)
    a.look(NOBODY, NOBODY)
    assert not a.must_stop


def test_all_start_the_same_ranks_when_the_last_has_said_its_own() -> None:
    a, b = two = some(2)
    for one in two:
        one.tell(Has.NONE)
    look(two)
    assert a.stop([1])
    assert not a.stop([1])
    look(two)
    assert (a.take_next(), b.take_next()) == (None, None)
    assert (a.waits, b.waits) == (True, False)
    assert a.silent == (1,)
    b.stop([2, 3])
    look(two)
    assert (a.take_next(), b.take_next()) == ([1, 2, 3], [1, 2, 3])
    look(two)
    assert not any(one.must_stop or one.waits or one.lacks_members for one in two)


def test_a_node_that_has_finished_has_nothing_to_say() -> None:
    a, *_ = both = some(2)
    a.tell(Has.NONE)
    look(both)
    assert not a.must_stop
    a.look(frozenset({1}), NOBODY)
    assert a.must_stop
    a.stop([0])
    a.look(frozenset({1}), NOBODY)
    assert a.take_next() == [0]


def test_nobody_starts_again_when_all_are_done() -> None:
    a, b = two = some(2)
    for one in two:
        one.tell(Has.DONE)
    look(two)
    assert not any(one.must_stop for one in two)
    b.tell(Has.NONE)  # one has failed before it came to its end
    look(two)
    assert (a.must_stop, b.must_stop) == (False, True)
    b.stop([1])
    look(two)
    assert a.must_stop
    a.stop([])
    look(two)
    assert (a.take_next(), b.take_next()) == ([1], [1])


def test_who_was_quick_to_finish_the_next_generation_is_not_left_out() -> None:
    a, b = two = some(2)
    for one in two:
        one.tell(Has.NONE)
    look(two)
    b.stop([1])
    a.stop([0])
    b.look(NOBODY, NOBODY)
    a.look(NOBODY, NOBODY)
    b.look(NOBODY, NOBODY)
    assert b.take_next() == [0, 1]
    a.look(frozenset({1}), NOBODY)  # b has done all its work meanwhile
    assert a.take_next() == [0, 1]


def test_whoever_has_a_member_stops_when_another_has_stopped() -> None:
    """What the other one read of all nodes was not read at one moment."""
    a, b = two = some(2)
    a.tell(Has.NONE)
    b.tell(Has.NONE)
    b.look(NOBODY, NOBODY)
    a.look(NOBODY, NOBODY)
    assert a.must_stop
    b.tell(Has.MEMBERS)
    a.stop([0])
    look(two)
    assert b.must_stop


def test_a_node_that_is_gone_is_waited_for_in_vain() -> None:
    a, *_ = some(2)
    a.tell(Has.NONE)
    a.look(NOBODY, frozenset({1}))
    assert a.must_stop
    a.stop([0])
    a.look(NOBODY, frozenset({1}))
    assert a.take_next() is None
    assert a.waits
    assert a.silent == (1,)


def test_what_a_node_has_said_does_not_count_when_it_is_gone() -> None:
    """Its ranks won't come to the next generation."""
    a, b = some(2)
    for one in (a, b):
        one.tell(Has.NONE)
        one.look(NOBODY, NOBODY)
    b.stop([1])
    b.look(NOBODY, NOBODY)
    a.stop([0])
    a.look(NOBODY, frozenset({1}))
    assert a.take_next() is None
    assert a.silent == (1,)


# -- with processes


@pytest.fixture
def two(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    """Ftruns of a worker each; the first has the store."""
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    monkeypatch.setattr(nodes, "GONE", 2.0)

    def begin(script: str, *more: str) -> list[Ftrun]:
        return start_two(start, script, "--policy", "replay", "--pair-log", str(tmp_path), *more)

    return begin


def spoken(run: Ftrun, generation: int) -> list[str]:
    """By the founder of a generation: rank, incarnation, generation, pid, finished. Who came before it may speak, too."""
    while int((line := run.read_lines(1)[0].split())[2]) < generation:
        pass
    return line


def test_all_workers_of_all_nodes_are_killed(two: Two) -> None:
    runs = two(WORKER + "me()\nif generation < 2: signal.pause()\n")
    for generation in range(2):
        pids = [int(spoken(run, generation)[3]) for run in runs]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert [spoken(run, 2)[4] for run in runs] == ["-", "-"]
    ended = [run.finish() for run in runs]
    assert [code for code, _, _ in ended] == [0, 0], ended


def test_the_last_worker_is_killed_when_the_others_have_finished(two: Two) -> None:
    runs = two(WORKER + "me()\nif rank == 1 and generation == 0: signal.pause()\n")
    spoken(runs[0], 0)
    runs[0].hear("waiting for the other nodes")
    os.kill(int(spoken(runs[1], 0)[3]), signal.SIGKILL)
    assert spoken(runs[1], 1)[4] == "0"
    ended = [run.finish() for run in runs]
    assert [code for code, _, _ in ended] == [0, 0], ended


def one_that_has_left_fails(two: Two, tmp_path: Path) -> list[Ftrun]:
    """While the other node's worker runs, in the next generation; and then that one ends."""
    for name in ("die", "end"):
        os.mkfifo(tmp_path / name)
    worker = """
me()
if rank == 0 and incarnation == 0:
    event("goodbye")
    wait("die")
    sys.exit(3)
if rank == 1 and generation == 0: signal.pause()
if rank == 1: wait("end")
"""
    runs = two(WORKER + worker)
    spoken(runs[0], 0)
    os.kill(int(spoken(runs[1], 0)[3]), signal.SIGKILL)
    assert spoken(runs[1], 1)[4] == "0"
    (tmp_path / "die").write_text("")
    runs[0].hear("rank 0 died (exit code 3)")
    (tmp_path / "end").write_text("")
    return runs


def test_who_has_left_runs_on_and_fails_is_started_with_the_generation_after(two: Two, tmp_path: Path) -> None:
    runs = one_that_has_left_fails(two, tmp_path)
    assert spoken(runs[0], 2)[4] == "1"
    ended = [run.finish() for run in runs]
    assert [code for code, _, _ in ended] == [0, 0], ended


def test_who_has_left_fails_before_its_node_has_begun_the_next_generation(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node has finished with it by then, and so says nothing more."""
    take_next, look_at = Generations.take_next, nodes.Nodes._look_at
    finished: list[int] = []

    def look_and_tell(self: nodes.Nodes, other: int) -> None:
        look_at(self, other)
        finished.extend(self._ends)

    def take_late(self: Generations) -> list[int] | None:
        return None if (self._node, self._generation, finished) == (0, 0, []) else take_next(self)

    monkeypatch.setattr(nodes.Nodes, "_look_at", look_and_tell)  # the ftruns are forked from here
    monkeypatch.setattr(Generations, "take_next", take_late)
    runs = one_that_has_left_fails(two, tmp_path)
    assert spoken(runs[0], 2)[4] == "1"
    ended = [run.finish() for run in runs]
    assert [code for code, _, _ in ended] == [0, 0], ended


def test_what_a_node_hears_while_it_is_about_to_sleep(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nobody has members any more, when it has looked for that, and before it has heard of nodes that have ended."""
    look, look_for_members = nodes.Nodes._look, ReplayAgent._look_for_members
    known = threading.Event()

    def look_and_tell(self: nodes.Nodes) -> None:
        before, generations = self._seen, self.generations
        look(self)
        nothing_new = self._seen == before and not self._poked and self._ends
        if generations is not None and generations.must_stop and generations._generation == 1 and nothing_new:
            known.set()

    def look_and_wait(self: ReplayAgent) -> None:
        look_for_members(self)
        generations = self._nodes.generations
        if generations.lacks_members and (generations._node, generations._generation) == (0, 1):
            assert known.wait(PATIENCE)
            self._read_events()  # else what it has just written itself wakes it

    monkeypatch.setattr(nodes.Nodes, "_look", look_and_tell)  # the ftruns are forked from here
    monkeypatch.setattr(ReplayAgent, "_look_for_members", look_and_wait)
    runs = one_that_has_left_fails(two, tmp_path)
    assert spoken(runs[0], 2)[4] == "1"
    ended = [run.finish() for run in runs]
    assert [code for code, _, _ in ended] == [0, 0], ended


def test_one_worker_is_killed_while_another_node_has_a_member(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Generations._write

    def write_and_say(self: Generations, generation: int, what: str, value: str) -> None:
        write(self, generation, what, value)
        print(f"{what} {value} is in the store", file=sys.stderr, flush=True)

    monkeypatch.setattr(Generations, "_write", write_and_say)  # the ftruns are forked from here
    os.mkfifo(tmp_path / "fifo")
    script = (
        "if incarnation > 0:\n    if rank == 1: wait('fifo')\n    joined(rank, incarnation)\nme()\nsignal.pause()\n"
    )
    runs = two(WORKER + script)
    first = [spoken(run, 0) for run in runs]
    os.kill(int(first[1][3]), signal.SIGKILL)
    runs[1].hear("has none is in the store")
    (tmp_path / "fifo").write_text("go")
    assert spoken(runs[1], 0)[1] == "1"
    runs[1].hear("has members is in the store")
    os.kill(int(first[0][3]), signal.SIGKILL)  # whose replacement the other one could let in
    rank, incarnation, generation, *_ = spoken(runs[0], 0)
    assert (rank, incarnation, generation) == ("0", "1", "0")
    for run in runs:
        run.send(signal.SIGINT)
    ended = [run.finish() for run in runs]
    assert [code for code, _, _ in ended] == [130, 130], ended
    assert not any("start again out of their logs" in err for _, _, err in ended), ended


def test_a_node_dies_with_the_last_members(two: Two) -> None:
    runs = two(WORKER + "me()\nsignal.pause()\n")
    pids = [int(spoken(run, 0)[3]) for run in runs]
    runs[1].send(signal.SIGKILL)
    os.kill(pids[0], signal.SIGUSR1)
    code, _, err = runs[0].finish()
    assert code == 1, err
    assert "node 1 is gone, and its ftrun with it. Nobody can go on without it" in err
    assert "rank 0 failed for good: killed by SIGUSR1" in err  # not: as its replacement was, which had nobody to join


@pytest.mark.parametrize(
    "faults",
    [
        "rank=1.0,at=start.link,do=kill",
        pytest.param("rank=0.0,at=start.link,do=kill", marks=pytest.mark.table),
        "rank=0.0,at=channel.receive:20,do=kill; rank=1.0,at=channel.receive:20,do=kill",
    ],
)
def test_a_ring_between_nodes_is_what_it_would_have_been(
    two: Two, monkeypatch: pytest.MonkeyPatch, faults: str
) -> None:
    """Where one dies in the start it fails for all of them."""
    monkeypatch.setenv("STEPS", "40")

    def digests(*more: str) -> list[str]:
        ended = [run.finish() for run in two(RING.read_text(), *more)]
        assert [code for code, _, _ in ended] == [0, 0], ended
        told = ["generation 1" in err for _, _, err in ended]
        assert told == [bool(more)] * 2, "\n".join(err for _, _, err in ended)
        return [out.splitlines()[-1].split()[-1] for _, out, _ in ended]

    if not _undisturbed:
        _undisturbed.extend(digests())
    assert digests("--faults", faults) == _undisturbed


_undisturbed: list[str] = []
