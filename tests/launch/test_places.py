"""Another ftrun takes the place of a node that is gone: started there again, or one that has waited as a spare."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest
from launch.running import Ftrun, Start, dynamic, start_nodes, wait_gone
from ports import free_port
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from ftcomm.launch import entrance, nodes, places
from ftcomm.launch.meeting import Meeting

# Until a worker of each rank of node 1 has come in that is not the first one.
LOSSY = """
import os
import numpy as np
import ftcomm
comm = ftcomm.init()
later = comm.job.incarnation >= int(os.environ.get("COMES_LATER", "1"))
if comm.job.incarnation > 0:
    comm.job.join_wait().wait()
os.write(1, f"up {comm.rank} {comm.job.incarnation}{os.environ.get('STAYS', '') and f' {os.getpid()}'}\\n".encode())
def all_see(one):
    try: return comm.agree(int(bool(one))) == 1
    except ftcomm.PeerFailure: return comm.ack_failed() and False  # since the last one: so it is for all
seen = np.zeros(1)
while seen[0] < comm.size // 2:
    seen[0] = later
    comm.all_reduce(seen)
    if all_see(comm.job.waiting()): comm.job.admit().wait()
if comm.rank == 0 and "STAYS" in os.environ: open(os.environ["WORK"] + "/fifo").read()
"""
REPLAY = """
import hashlib, os, signal
import numpy as np
import ftcomm
comm = ftcomm.init()
mine = np.random.default_rng(comm.rank).standard_normal(500)
arrived = np.empty_like(mine)
for step in range(40):
    if step == 20 and (stop := f"{comm.rank}.{os.environ['FTCOMM_GENERATION']}") in os.environ["STOPS"].split():
        os.write(1, f"half {stop} {os.getpid()}\\n".encode())
        signal.pause()
    ftcomm.ft_send(mine, 1 - comm.rank)
    ftcomm.ft_recv(arrived, 1 - comm.rank)
    mine = 0.6 * mine + 0.3 * arrived
    ftcomm.ft_all_reduce(mine, "avg")
os.write(1, f"rank {comm.rank} {hashlib.sha256(mine.tobytes()).hexdigest()[:16]}\\n".encode())
comm.leave()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    monkeypatch.setattr(entrance, "LOOK", 0.1)


def static(port: int, node: int, each: int, *flags: str) -> tuple[str, ...]:
    place = ("--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(port))
    return ("--nnodes", "2", "--nproc-per-node", str(each), "--node-rank", str(node), *place, *flags)


def c10d(port: int, has_store: bool) -> tuple[str, ...]:
    return dynamic(port, "--policy", "lossy", run="spares", each=2, conf=f"is_host={int(has_store)}")


def kill(one: Ftrun) -> None:
    one.send(signal.SIGKILL)
    one.finish()


def end_well(*ftruns: Ftrun) -> list[tuple[str, str]]:
    """What their workers and they have said."""
    ends = [one.finish() for one in ftruns]
    assert [code for code, _, _ in ends] == [0] * len(ends), "\n".join(f"{code}\n{out}{err}" for code, out, err in ends)
    return [(out, err) for _, out, err in ends]


def all_well(*ftruns: Ftrun) -> list[str]:
    return [err for _, err in end_well(*ftruns)]


def two_up(start: Start, script: str, each: int, *flags: str, **env: str) -> tuple[int, Ftrun, Ftrun]:
    """The port, and two nodes whose workers have all said that they are up."""
    port = free_port()
    first, second = (start(script, *static(port, node, each, *flags), **env) for node in range(2))
    first.read_lines(each)
    second.read_lines(each)
    return port, first, second


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_started_again_there(start: Start, sig: signal.Signals) -> None:
    port, first, second = two_up(start, LOSSY, 2, "--policy", "lossy")
    second.send(sig)
    second.finish()
    again = start(LOSSY, *static(port, 1, 2, "--policy", "lossy"))
    assert sorted(again.read_lines(2)) == ["up 2 2", "up 3 2"]
    said = all_well(first, again)
    assert "another ftrun has taken the place of node 1" in said[0]
    assert "this node takes the place of node 1, which is gone: its workers are replacements" in said[1]


def test_again_and_again(start: Start) -> None:
    """Who comes later has a higher incarnation than all who were there, and as many restarts as anybody."""
    more = ("--policy", "lossy", "--max-restarts", "1")
    port, first, second = two_up(start, LOSSY, 2, *more, COMES_LATER="6")
    kill(second)
    third = start(LOSSY, *static(port, 1, 2, *more), COMES_LATER="6")
    assert sorted(third.read_lines(2)) == ["up 2 2", "up 3 2"]
    pid = int(third.hear("slot 2: replacement 2")[-1].split("pid ")[1].rstrip(")\n"))
    os.kill(pid, signal.SIGKILL)
    assert third.read_lines(1) == ["up 2 3"]
    kill(third)
    fourth = start(LOSSY, *static(port, 1, 2, *more), COMES_LATER="6")
    assert sorted(fourth.read_lines(2)) == ["up 2 5", "up 3 5"]
    kill(fourth)
    all_well(first, start(LOSSY, *static(port, 1, 2, *more), COMES_LATER="6"))


def test_a_spare(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    """Another one, when the first has taken a place and the one that lost it has ended: that closes no rendezvous."""
    shutdown = DynamicRendezvousHandler.shutdown
    monkeypatch.setattr(DynamicRendezvousHandler, "shutdown", lambda self: os.write(2, b"closes\n") and shutdown(self))
    monkeypatch.setattr(places, "SILENT", 2.0)
    monkeypatch.setattr(nodes, "SURE", 1.0)
    port = free_port()
    first, second = (start(LOSSY, *c10d(port, node == 0), COMES_LATER="3") for node in range(2))
    assert sorted(first.read_lines(2)) == ["up 0 0", "up 1 0"]
    assert sorted(second.read_lines(2)) == ["up 2 0", "up 3 0"]
    spare = start(LOSSY, *c10d(port, False), COMES_LATER="3")
    spare.hear("this one waits")
    second.send(signal.SIGSTOP)
    assert sorted(spare.read_lines(2)) == ["up 2 2", "up 3 2"]
    second.send(signal.SIGCONT)
    code, _, err = second.finish()
    assert code == 1
    assert "closes" not in err
    another = start(LOSSY, *c10d(port, False), COMES_LATER="3")
    another.hear("this one waits")
    kill(spare)
    assert sorted(another.read_lines(2)) == ["up 2 4", "up 3 4"]
    assert all("closes" in said for said in all_well(first, another))


def results(*ftruns: Ftrun) -> list[str]:
    """Of REPLAY."""
    return sorted(line for out, _ in end_well(*ftruns) for line in out.splitlines() if line.startswith("rank"))


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """The results, once there are some."""
    return []


def of_an_undisturbed_run(start: Start, known: list[str]) -> list[str]:
    if not known:
        known += results(*start_nodes(start, REPLAY, 2, 1, "--policy", "replay", STOPS=""))
    assert len(known) == 2
    return known


def test_under_replay(start: Start, undisturbed: list[str]) -> None:
    """Its log is lost with it, and had again from the other."""
    port = free_port()
    first, second = (start(REPLAY, *static(port, node, 1, "--policy", "replay"), STOPS="1.0") for node in range(2))
    second.read_lines(1)
    kill(second)
    again = start(REPLAY, *static(port, 1, 1, "--policy", "replay"), STOPS="")
    assert results(first, again) == of_an_undisturbed_run(start, undisturbed)


def test_under_replay_in_a_later_generation(start: Start, undisturbed: list[str]) -> None:
    port = free_port()
    stops = {"STOPS": "0.0 1.0 1.1"}
    ftruns = [start(REPLAY, *static(port, node, 1, "--policy", "replay"), **stops) for node in range(2)]
    pids = [int(one.read_lines(1)[0].split()[2]) for one in ftruns]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    first, second = ftruns
    while not second.read_lines(1)[0].startswith("half 1.1"):
        pass  # of a replacement that came before they knew that all were dead
    kill(second)
    again = start(REPLAY, *static(port, 1, 1, "--policy", "replay"), STOPS="")
    assert results(first, again) == of_an_undisturbed_run(start, undisturbed)


def test_one_that_was_stopped_ends(monkeypatch: pytest.MonkeyPatch, start: Start, tmp_path: Path) -> None:
    """It has been taken for dead: whoever was started in its place stays."""
    monkeypatch.setattr(places, "SILENT", 2.0)
    monkeypatch.setattr(nodes, "SURE", 1.0)
    os.mkfifo(tmp_path / "fifo")
    port = free_port()
    first, second = (start(LOSSY, *static(port, node, 1, "--policy", "lossy"), STAYS="1") for node in range(2))
    first.read_lines(1)
    worker = os.pidfd_open(int(second.read_lines(1)[0].split()[3]))
    second.send(signal.SIGSTOP)
    again = start(LOSSY, *static(port, 1, 1, "--policy", "lossy"))
    assert again.read_lines(1)[0].startswith("up 1 2")
    wait_gone([worker])  # it has been voted out
    second.send(signal.SIGCONT)
    code, _, err = second.finish()
    assert code == 1
    assert "another ftrun has taken the place of node 1, as this one has given no sign of life" in err
    assert "slot 1" not in err, "it has started a worker beside the other one's"
    with open(tmp_path / "fifo", "w"):
        pass
    all_well(first, again)


@pytest.mark.parametrize("policy", ["lossy", "replay"])
def test_one_that_lives_keeps_its_place(start: Start, policy: str) -> None:
    port = free_port()
    waits = "import os, signal\nos.write(1, b'up\\n')\nsignal.pause()\n"
    first, second = (start(waits, *static(port, node, 1, "--policy", policy)) for node in range(2))
    first.read_lines(1)
    second.read_lines(1)
    code, _, err = start(waits, *static(port, 1, 1, "--policy", policy)).finish()
    assert code == 1
    assert "node 1 is there already, and its ftrun lives: see --node-rank" in err
    second.send(signal.SIGINT)
    assert second.finish()[0] == 130


SHORT = """
import os
import ftcomm
if os.environ["FTCOMM_INCARNATION"] > "0": open(os.environ["WORK"] + "/late").read()
comm = ftcomm.init()
os.write(1, b"up\\n")
open(f"{os.environ['WORK']}/fifo{comm.rank}").read()
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_comes_too_late_changes_nothing(
    start: Start, tmp_path: Path, sig: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end as without it: well, if the node was told to go."""
    look_at = nodes.Nodes._look_at

    def tell(self: nodes.Nodes, other: int) -> None:
        look_at(self, other)
        if other in self._ends:
            os.write(2, b"knows the other's end\n")

    monkeypatch.setattr(nodes.Nodes, "_look_at", tell)
    for name in ("late", "fifo0", "fifo1"):
        os.mkfifo(tmp_path / name)
    port, first, second = two_up(start, SHORT, 1, "--policy", "lossy")
    second.send(sig)
    second.finish()
    again = start(SHORT, *static(port, 1, 1, "--policy", "lossy"))
    again.hear("takes the place")
    for name in ("fifo0", "late"):
        with open(tmp_path / name, "w"):
            pass
        if name == "fifo0":
            again.hear("knows the other's end")
    code, _, err = again.finish()
    assert code == 1
    assert "the others had finished before it came in" in err
    assert "replacement 3" not in err
    code, _, err = first.finish()
    assert code == (0 if sig is signal.SIGTERM else 1), err
    assert sig is signal.SIGTERM or "node 1 is gone" in err


LATE = """
import os
import ftcomm
comm = ftcomm.init()
if comm.job.incarnation > 0:
    comm.job.join_wait().wait()
    os.write(1, b"in\\n")
    open(os.environ["WORK"] + "/late").read()
    raise SystemExit(7)
os.write(1, b"up\\n")
while not comm.job.waiting():
    if comm.rank == 1: open(os.environ["WORK"] + "/never").read()
comm.job.admit().wait()
"""


def test_one_that_was_in_and_fails_has_failed(start: Start, tmp_path: Path) -> None:
    """Also when the others have finished, and whatever its node's last ftrun has said."""
    for name in ("late", "never"):
        os.mkfifo(tmp_path / name)
    more = ("--policy", "lossy", "--max-restarts", "0")
    port, first, second = two_up(start, LATE, 1, *more)
    second.send(signal.SIGTERM)
    second.finish()
    again = start(LATE, *static(port, 1, 1, *more))
    assert again.read_lines(1) == ["in"]
    first.hear("waiting for the other nodes")
    with open(tmp_path / "late", "w"):
        pass
    code, _, err = again.finish()
    assert code == 1
    assert "rank 1 failed for good: exit code 7" in err
    code, _, err = first.finish()
    assert code == 1
    assert "a worker of node 1 failed for good" in err


def test_another_number_of_workers(start: Start) -> None:
    port, first, second = two_up(start, LOSSY, 1, "--policy", "lossy")
    kill(second)
    code, _, err = start(LOSSY, *static(port, 1, 2, "--policy", "lossy")).finish()
    assert code == 1
    assert "node 1 had 1 workers, and whoever takes its place has to have as many: --nproc-per-node 1" in err
    again = start(LOSSY, *static(port, 1, 1, "--policy", "lossy"))
    all_well(first, again)


PLAIN = """
import os
if os.environ["FTCOMM_INCARNATION"] == "0" and os.environ["RANK"] == "1":
    open(os.environ["WORK"] + "/fifo").read()
    raise SystemExit(1)
"""


def test_workers_that_are_independent_of_each_other_are_restarted(start: Start, tmp_path: Path) -> None:
    """They use no ftcomm: that the others have succeeded says nothing."""
    os.mkfifo(tmp_path / "fifo")
    port = free_port()
    first, second = (start(PLAIN, *static(port, node, 1)) for node in range(2))
    first.hear("waiting for the other nodes")
    with open(tmp_path / "fifo", "w"):
        pass
    assert "slot 1: replacement 1 started" in all_well(first, second)[1]


def test_the_policy_raise_takes_none(start: Start) -> None:
    """Whoever has tried it changes nothing: the node was told to go, and the others succeed."""
    waits = "import os, signal, ftcomm\nftcomm.init()\nsignal.signal(signal.SIGUSR1, lambda *_: os._exit(0))\n"
    waits += "os.write(1, f'up {os.getpid()}\\n'.encode())\nsignal.pause()\n"
    port = free_port()
    first, second = (start(waits, *static(port, node, 1, "--policy", "raise")) for node in range(2))
    pid = int(first.read_lines(1)[0].split()[1])
    second.read_lines(1)
    second.send(signal.SIGTERM)
    second.finish()
    again = start(waits, *static(port, 1, 1, "--policy", "raise"))
    again.hear("the policy raise takes no replacements")
    os.kill(pid, signal.SIGUSR1)
    assert again.finish()[0] == 1
    all_well(first)


def test_one_that_waits_for_others_at_the_start_keeps_its_place(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    """Of two for one node whoever is the first has it; torch's store lets both in at once, when there are as many as nodes."""
    monkeypatch.setattr(places, "SILENT", 1.0)
    port = free_port()
    three = [("--nnodes", "3", *static(port, node, 1)[2:]) for node in range(3)]
    first, *same = (start("", *three[node]) for node in (0, 1, 1))
    poller = select.poll()
    ends = {os.pidfd_open(one.process.pid): one for one in same}
    for fd in ends:
        poller.register(fd, select.POLLIN)
    ended = ends[poller.poll(60_000)[0][0]]
    code, _, err = ended.finish()
    assert code == 1
    assert "node 1 is there already" in err
    same.remove(ended)
    all_well(first, *same, start("", *three[2]))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """ftrun says what it has written on the board, and when it meets the others in torch's rendezvous."""
    write, begin = places.Places.write, Meeting.begin

    def tell(board: places.Places, key: str, value: str) -> None:
        write(board, key, value)
        os.write(2, f"wrote {key}\n".encode())

    def meet(self: Meeting) -> None:
        os.write(2, b"meets\n")
        begin(self)

    monkeypatch.setattr(places.Places, "write", tell)
    monkeypatch.setattr(Meeting, "begin", meet)


@pytest.mark.table
@pytest.mark.usefixtures("told")
def test_a_spare_waits_for_as_long_as_it_takes(start: Start) -> None:
    """Torch gives it join_timeout once a node is lost, and closes the rendezvous for all when somebody ends."""
    port = free_port()
    flags = {
        has_store: tuple(
            f"{flag},join_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2"
            if flag.startswith("is_host")
            else flag
            for flag in c10d(port, has_store)
        )
        for has_store in (True, False)
    }
    first, second = (start(LOSSY, *flags[node == 0], COMES_LATER="3") for node in range(2))
    first.read_lines(2)
    second.read_lines(2)
    taker = start(LOSSY, *flags[False], COMES_LATER="3")
    taker.hear("this one waits")
    kill(second)
    taker.read_lines(2)
    other = start(LOSSY, *flags[False], "--nproc-per-node", "3", COMES_LATER="3")
    for _ in range(2):  # torch's time is over, and it waits again
        other.hear("meets")
    kill(taker)
    other.hear("node 1 had 2 workers, and whoever takes its place has to have as many")
    spare = start(LOSSY, *flags[False], COMES_LATER="3")
    assert sorted(spare.read_lines(2)) == ["up 2 4", "up 3 4"]
    all_well(first, spare)
    assert other.finish()[0] == 1


@pytest.mark.usefixtures("told")
def test_ranks_that_have_finished_are_not_started_again(start: Start) -> None:
    ends = """
import os, signal
import ftcomm
comm = ftcomm.init()
os.write(1, b"up\\n")
comm.leave()
if comm.rank != 2: signal.pause()  # it works on, for itself
"""
    port, _, second = two_up(start, ends, 2, "--policy", "replay")
    second.hear("wrote finished/1")
    kill(second)
    code, _, err = start(ends, *static(port, 1, 2, "--policy", "replay")).finish()
    assert code == 1
    assert "the place of node 1 can't be taken: ranks 2 had finished there" in err


def test_a_connection_that_breaks_is_made_again(monkeypatch: pytest.MonkeyPatch, start: Start, tmp_path: Path) -> None:
    """Else who has lost it would not be seen to live, and would not see that somebody has its place."""
    beat = places.Places.beat

    def broken(board: places.Places, node: int) -> None:
        if (tmp_path / "cut").exists() and node == 1 and not hasattr(board, "was_cut"):
            board.was_cut = True  # type: ignore[attr-defined]
            raise RuntimeError("Broken pipe")
        beat(board, node)

    monkeypatch.setattr(places.Places, "beat", broken)
    monkeypatch.setattr(places, "SILENT", 2.0)
    port = free_port()
    waits = "import os, signal\nos.write(1, b'up\\n')\nsignal.pause()\n"
    first, second = (start(waits, *static(port, node, 1, "--policy", "lossy")) for node in range(2))
    first.read_lines(1)
    second.read_lines(1)
    (tmp_path / "cut").touch()
    code, _, err = start(waits, *static(port, 1, 1, "--policy", "lossy")).finish()
    assert code == 1
    assert "node 1 is there already, and its ftrun lives" in err


def test_a_store_that_cannot_compare_and_set() -> None:
    """Such as torch's for etcd: nodes meet there, and nobody takes a place."""

    class Plain:
        compare_set = property()

    place = places.Places(Plain()).found(1, 2)
    assert place == places.Place(1, "")


def test_a_store_that_never_answers_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is lost says nothing at all: what waits for its word is started a minute later. A stop is no such minute."""
    now = [0.0]
    monkeypatch.setattr(nodes, "_now", lambda: now[0])
    monkeypatch.setattr(nodes, "BEAT", 5.0)
    one = nodes.Nodes(HashStore(), places.Place(1, "1 1 token"), 2, False)
    assert one.is_sure()
    now[0] = 1000.0  # it was stopped
    assert not one.is_sure()
    asks = 0
    while not one.is_sure():
        now[0] += 5.0
        asks += 1
    assert asks == 12
    assert one.store_is_gone


def test_another_store_in_place_of_the_first_is_none() -> None:
    """The first node's ftrun was started again: nobody has taken the place of this one."""
    one = nodes.Nodes(HashStore(), places.Place(1, "1 1 token"), 2, False)
    assert one._has_lost_place()
    assert one.store_is_gone
    assert not one.lost_place
