"""``ftcomm store``: each node may be lost, the first one, too; and what one run leaves there no other one finds."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launch.running import STORE, Ftrun, Kept, Start, dynamic, start_nodes
from launch.test_places import LOSSY, REPLAY, all_well, kill, results
from ports import free_port
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from ftcomm.launch import entrance, keeper, nodes, places
from ftcomm.launch.meeting import Meeting
from ftcomm.launch.parent import die_with_launcher

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
    said = [kept.next_line() for _ in range(4 * 3)]  # each node says of its run that it is over
    assert sum("begins" in line for line in said) == 4, said
    assert kept.listening() == 1


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


@pytest.mark.table
def test_all_nodes_are_lost_and_the_spare_sees_it_of_one_first(
    start: Start, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not take the place of that one, where nobody would let it in."""
    monkeypatch.setattr(places, "SILENT", 3.0)
    flags = kept.flags("--policy", "lossy", conf=QUICK)
    two = in_order(*(start(LOSSY, *flags) for _ in range(2)))
    spare = start(LOSSY, *flags, COMES_LATER="0")
    spare.hear("this one waits")
    for one in two:  # no process ends, which would be known here
        one.send(signal.SIGSTOP)
        time.sleep(1.0)
    all_well(spare, start(LOSSY, *flags, COMES_LATER="0"))


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


def test_a_stopped_node_of_a_run_that_has_begun_anew(start: Start, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and its worker with it, else there were two runs at once."""
    monkeypatch.setattr(places, "SILENT", 2.0)
    monkeypatch.setattr(nodes, "SURE", 1.0)
    flags = kept.flags("--policy", "lossy", conf=QUICK)
    first, second = in_order(*(start(LOSSY, *flags) for _ in range(2)))
    second.send(signal.SIGSTOP)
    kill(first)  # with Ctrl-C the second one's worker might fail before it is ended
    two = in_order(*(start(LOSSY, *flags, COMES_LATER="2") for _ in range(2)))
    second.send(signal.SIGCONT)
    code, _, err = second.finish()
    assert code == 1
    assert "another ftrun has taken" in err
    third = start(LOSSY, *flags, COMES_LATER="2")
    third.hear("this one waits")
    kill(two[0])
    all_well(two[1], third)


def test_a_spare_that_came_just_before_the_end(
    start: Start, kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No beat has come since: it would take the run for one of long ago, and do the job again."""
    monkeypatch.setattr(nodes, "BEAT", 60.0)
    test_a_spare_that_was_not_needed(start, kept, tmp_path)


@pytest.mark.parametrize("when", ["while they meet", pytest.param("when they have met", marks=pytest.mark.table)])
def test_the_other_spare_is_gone(
    start: Start, kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    """Torch has the two as the nodes of the next round; the one that is left begins it with another one."""
    meet, serve = DynamicRendezvousHandler.next_rendezvous, DynamicRendezvousHandler._create_tcp_store_server
    wait = Meeting.wait

    def hold(*args: Any) -> Any:
        if (tmp_path / "hold").exists():
            os.write(2, b"is held\n")
            (tmp_path / "hold").read_text()
        return wait(*args)

    def tell(self: DynamicRendezvousHandler) -> Any:
        met = meet(self)
        os.write(2, b"has met\n")
        return met

    def die(self: DynamicRendezvousHandler, *args: Any) -> Any:  # the first node does this, and then says where it is
        if os.environ.get("DIES"):
            os.kill(os.getpid(), signal.SIGKILL)
        return serve(self, *args)

    monkeypatch.setattr(Meeting, "wait", hold)
    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", tell)
    monkeypatch.setattr(DynamicRendezvousHandler, "_create_tcp_store_server", die)
    flags = kept.flags("--policy", "lossy", conf=f"{QUICK},read_timeout=5")
    two = in_order(*(start(LOSSY, *flags, COMES_LATER="9") for _ in range(2)))
    takers = []
    for lost in two:
        takers.append(start(LOSSY, *flags, COMES_LATER="9"))
        takers[-1].hear("this one waits")
        kill(lost)
        takers[-1].read_lines(1)
    dies = when == "while they meet"
    spares = [start(LOSSY, *flags, COMES_LATER="0", DIES="1" if dies and n == 0 else "") for n in range(2)]
    if dies:  # it has the lower number, and is the first node for that
        assert spares[0].finish()[0] == -signal.SIGKILL
    else:
        for spare in spares:
            spare.hear("has met")
        kill(spares[0])
    # Else it may see that one has ended, when the other one has not yet, and takes its place.
    os.mkfifo(tmp_path / "hold")
    spares[1].hear("is held")
    for one in takers:
        one.send(signal.SIGINT)
    assert {one.finish()[0] for one in takers} == {130}
    with open(tmp_path / "hold", "w"):
        (tmp_path / "hold").unlink()
    all_well(spares[1], start(LOSSY, *flags, COMES_LATER="0"))


def test_each_node_has_its_own_name_for_the_keeper(start: Start, kept: Kept) -> None:
    script = "import os, ftcomm\nos.write(1, (os.environ['MASTER_ADDR'] + '\\n').encode())\nftcomm.init()\n"
    flags = kept.flags()
    one = start(script, *flags)
    other = start(script, *(flag.replace("127.0.0.1", "localhost") for flag in flags))
    assert one.read_lines(1) == ["127.0.0.1"]
    assert other.read_lines(1) == ["localhost"]
    all_well(one, other)


def test_the_job_has_its_own_store(start: Start, kept: Kept) -> None:
    """As torch has it where its stores are not shared; a second run of the name is one, too."""
    for _ in range(2):
        env = {"COMES_LATER": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        all_well(*(start(LOSSY, *kept.flags(conf=QUICK), **env) for _ in range(2)))


def test_a_spare_without_the_secret(start: Start, kept: Kept) -> None:
    """It takes no place."""
    flags = kept.flags("--policy", "lossy")
    first, second = in_order(*(start(LOSSY, *flags, FTCOMM_SECRET="of sixteen chars") for _ in range(2)))
    stranger = start(LOSSY, *flags)
    code, _, err = stranger.finish()
    assert code == 2, err
    assert "FTCOMM_SECRET is set on some nodes only" in err
    spare = start(LOSSY, *flags, FTCOMM_SECRET="of sixteen chars")
    spare.hear("this one waits")
    kill(second)
    all_well(first, spare)


def test_nobody_reads_what_it_says(start: Start) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([*STORE, str(port := free_port())], stderr=full, preexec_fn=die_with_launcher())  # noqa: PLW1509
    try:
        for name in ("a", "b"):
            flags = dynamic(port, run=name, each=1, conf="is_host=0")
            all_well(*(start(LOSSY, *flags, COMES_LATER="0") for _ in range(2)))
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> tuple[keeper.Keeper, TCPStore]:
    """A keeper in this process, and a connection to it."""
    monkeypatch.setattr(keeper, "LOOK", 0.05)
    one = keeper.Keeper(free_port())
    return one, TCPStore("127.0.0.1", one.port)


Own = tuple[keeper.Keeper, TCPStore]


def opened(own: Own, run: str) -> int:
    """The port of a store for a run of a node."""
    one, store = own
    number = keeper._post(store, opens=run, prefix=run, nodes=1)
    one.read_next()
    return int(store.get(f"ftcomm/store/port/{number}"))


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_letters(own: Own) -> None:
    """What is no letter is passed over, a store that another run of the name has meanwhile is not closed."""
    one, store = own
    store.set("ftcomm/store/letter/1", "[]")
    assert "no letter" in one.read_next()[0]
    port = opened(own, "a")
    TCPStore("127.0.0.1", port).set("key", "1")
    later = opened(own, "a")
    assert not TCPStore("127.0.0.1", later).check(["key"])
    keeper.close_store(store, "a", port)
    one.read_next()
    assert is_open(later)
    keeper.close_store(store, "a", later)
    one.read_next()
    assert not is_open(later)


def test_one_store_more_cannot_be_opened(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """That run does not begin; those that are there have theirs."""
    port = opened(own, "a")
    serve = keeper._serve

    def refuse(port: int) -> TCPStore:
        raise RuntimeError("Failed to init uv loop\nand so on")

    monkeypatch.setattr(keeper, "_serve", refuse)
    one, store = own
    number = keeper._post(store, opens="b", prefix="b", nodes=1)
    assert "can't begin" in one.read_next()[0]
    assert store.get(f"ftcomm/store/port/{number}") == b'"Failed to init uv loop"'
    monkeypatch.setattr(keeper, "_serve", serve)
    assert is_open(port)
    assert is_open(opened(own, "c"))


def test_the_store_of_a_run_of_which_all_nodes_are_gone(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "GONE", 1.0)
    one, store = own
    lives, gone = opened(own, "lives"), opened(own, "gone")
    board = places.Places(PrefixStore("lives", store))
    said: list[str] = []
    while not said:
        board.beat(0)
        said = one.read_next()
    assert said == ["run 'gone' has shown nothing for long: its store is closed"]
    assert is_open(lives)
    assert not is_open(gone)
