"""``ftcomm store``: each node may be lost, the first one, too; and what one run leaves there no other one finds."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from launch.running import STORE, Ftrun, Kept, Start, start_nodes
from launch.test_places import LOSSY, REPLAY, all_well, kill, results
from ports import free_port
from torch.distributed import TCPStore

from ftcomm.launch import entrance, keeper, nodes

QUICK = ",keep_alive_interval=1,keep_alive_max_attempt=2"  # torch's own time to see that a node is gone


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    monkeypatch.setattr(entrance, "LOOK", 0.1)


def in_order(*ftruns: Ftrun) -> list[Ftrun]:
    """By the ranks of their workers: which comes first is torch's affair. Of scripts that begin by saying who they are."""
    ups = [(int(one.read_lines(1)[0].split()[1]), one) for one in ftruns]
    return [one for _, one in sorted(ups, key=lambda up: up[0])]


def test_all_nodes_are_lost_one_after_the_other(start: Start, kept: Kept) -> None:
    flags = kept.flags("--policy", "lossy")
    first, second = in_order(*(start(LOSSY, *flags, COMES_LATER="4") for _ in range(2)))
    third = start(LOSSY, *flags, COMES_LATER="4")
    third.hear("this one waits")
    kill(first)
    assert third.read_lines(1) == ["up 0 2"]
    third.hear("takes the place of node 0, which is gone")
    fourth = start(LOSSY, *flags, COMES_LATER="4")
    fourth.hear("this one waits")
    kill(second)
    assert fourth.read_lines(1) == ["up 1 2"]
    fifth = start(LOSSY, *flags, COMES_LATER="4")
    fifth.hear("this one waits")
    kill(third)
    assert fifth.read_lines(1) == ["up 0 4"]
    all_well(fourth, fifth)


def test_the_first_node_is_lost_under_replay(start: Start, kept: Kept) -> None:
    undisturbed = results(*start_nodes(start, REPLAY, 2, 1, "--policy", "replay", STOPS=""))
    flags = kept.flags("--policy", "replay")
    ftruns = [start(REPLAY, *flags, STOPS="0.0") for _ in range(2)]
    ready, _, _ = select.select([one.process.stdout for one in ftruns], [], [])
    first = next(one for one in ftruns if one.process.stdout in ready)
    assert first.read_lines(1)[0].startswith("half 0.0")
    ftruns.remove(first)
    kill(first)
    assert results(*ftruns, start(REPLAY, *flags, STOPS="")) == undisturbed


def test_runs_do_not_find_each_other(start: Start, kept: Kept) -> None:
    """At once, and one after the other under one name; each store goes with its run."""
    for _ in range(2):
        runs = [kept.flags(run=name, conf=QUICK) for name in ("one", "one", "other", "other")]
        all_well(*(start(LOSSY, *flags, COMES_LATER="0") for flags in runs))
    said = [kept.next_line() for _ in range(8)]
    assert sum("begins" in line for line in said) == 4, said
    while kept.listening() > 1:
        kept.next_line()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGINT])
def test_a_spare_of_a_run_that_begins_again(start: Start, kept: Kept, sig: signal.Signals) -> None:
    """It is one of its nodes then, and takes no place in a run of which nobody is left."""
    flags = kept.flags("--policy", "lossy", conf=QUICK)
    two = [start(LOSSY, *flags) for _ in range(2)]
    first, second = in_order(*two)
    spare = start(LOSSY, *flags)
    spare.hear("this one waits")
    spare.send(signal.SIGSTOP)
    for one in (first, second):
        one.send(sig)
    assert {one.finish()[0] for one in two} == {130 if sig is signal.SIGINT else -sig}
    spare.send(signal.SIGCONT)
    another = start(LOSSY, *flags, COMES_LATER="0")  # with the spare: the run has not come to its end
    all_well(spare, another)


def test_a_spare_that_was_not_needed(start: Start, kept: Kept, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    waits = "import os, ftcomm\ncomm = ftcomm.init()\nos.write(1, f'up {comm.rank}\\n'.encode())\n"
    waits += "open(os.environ['WORK'] + '/fifo').read()\n"
    flags = kept.flags("--policy", "lossy")
    two = in_order(start(waits, *flags), start(waits, *flags))
    spare = start(waits, *flags)
    spare.hear("this one waits")
    with open(tmp_path / "fifo", "w"):
        pass
    all_well(*two)
    code, _, err = spare.finish()
    assert code == 1
    assert "the run has had all its nodes without this one (--nnodes), and is over" in err


def test_no_store_is_left_in_the_first_node(start: Start, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = nodes.Nodes.begin

    def tell(self: nodes.Nodes) -> None:
        os.write(2, f"serves {entrance.serves_store()}\n".encode())
        begin(self)

    monkeypatch.setattr(nodes.Nodes, "begin", tell)
    two = [start(LOSSY, *kept.flags(), COMES_LATER="0") for _ in range(2)]
    assert all("serves False" in said for said in all_well(*two))


def test_the_store_is_lost(start: Start, kept: Kept) -> None:
    """A replacement would come in through it: nobody waits for that."""
    waits = (
        "import os, signal, ftcomm\ncomm = ftcomm.init()\nos.write(1, f'up {comm.rank} {os.getpid()}\\n'.encode())\n"
    )
    waits += "signal.pause()\n"
    two = [start(waits, *kept.flags("--policy", "lossy")) for _ in range(2)]
    pids = [int(one.read_lines(1)[0].split()[2]) for one in two]
    kept.process.kill()
    kept.process.wait()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ends = [one.finish() for one in two]
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert all("the job's store, through which it would come in, is gone" in err for _, _, err in ends), ends


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_it_ends(kept: Kept, sig: signal.Signals) -> None:
    kept.process.send_signal(sig)
    assert kept.process.wait() == -sig


def test_a_port_in_use() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run([*STORE, str(port)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"can't listen at port {port}: it is in use. Give another one (--port)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_port() -> None:
    done = subprocess.run([*STORE, "70000"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--port 70000 must be between 0 and 65535" in done.stderr


def test_letters() -> None:
    """What is no letter is passed over, a store that another run of the name has meanwhile is not closed."""
    one = keeper.Keeper(free_port())
    store = TCPStore("127.0.0.1", one.port)
    store.set("ftcomm/store/letter/1", "[]")
    assert "no letter" in one.read_next()
    number = keeper._post(store, opens="a")
    one.read_next()
    port = int(store.get(f"ftcomm/store/port/{number}"))
    TCPStore("127.0.0.1", port).set("key", "1")
    number = keeper._post(store, opens="a")
    one.read_next()
    later = int(store.get(f"ftcomm/store/port/{number}"))
    assert not TCPStore("127.0.0.1", later).check(["key"])
    keeper.close_store(store, "a", port)
    one.read_next()
    TCPStore("127.0.0.1", later).set("key", "1")
    keeper.close_store(store, "a", later)
    one.read_next()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", later))
