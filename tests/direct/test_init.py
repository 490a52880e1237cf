"""Starting a job: every init method, ranks that never come or fail, wrong settings, importing without side effects."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks
from ports import free_port

import ftcomm
from ftcomm import rendezvous
from ftcomm._lib import lib


def check(comm: ftcomm.Communicator) -> int:
    buf = np.full(10, comm.rank + 1)
    comm.all_reduce(buf)
    comm.leave()
    return int(buf[0])


def test_environment(ranks: Ranks) -> None:
    port = free_port()

    def run(group: Group, context: Context) -> int:
        os.environ.update(RANK=str(context.rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return check(ftcomm.init())

    assert ranks(3, run, direct=False) == [6, 6, 6]


def test_tcp_address(ranks: Ranks) -> None:
    port = free_port()

    def run(group: Group, context: Context) -> int:
        return check(ftcomm.init(context.rank, 2, f"tcp://localhost:{port}"))

    assert ranks(2, run, direct=False) == [3, 3]


def test_file(ranks: Ranks, tmp_path: Path) -> None:
    def run(group: Group, context: Context) -> int:
        return check(ftcomm.init(context.rank, 3, f"file://{tmp_path}/meet"))

    assert ranks(3, run, direct=False) == [6, 6, 6]

    def again(group: Group, context: Context) -> None:
        with pytest.raises(ftcomm.ConfigError, match="left over from an earlier run"):
            run(group, context)

    ranks(3, again, direct=False)


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix"])
def test_torch_stores(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    distributed = pytest.importorskip("torch.distributed")
    port = free_port()

    def run(group: Group, context: Context) -> int:
        if kind == "file":
            store = distributed.FileStore(str(tmp_path / "store"), 2)
        else:
            store = distributed.TCPStore("127.0.0.1", port, 2, context.rank == 0)
        if kind == "prefix":
            store = distributed.PrefixStore("a/b", store)
        comm = ftcomm.init(context.rank, 2, store=store, options=ftcomm.Options(transport="tcp", authority="store"))
        return check(comm)

    assert ranks(2, run, direct=False) == [3, 3]


def test_a_rank_that_never_comes(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody who came gets the same Timeout, which names it. Before that one of them says for whom they wait."""
    monkeypatch.setattr(rendezvous, "_SILENT_FOR", 0.1)

    def run(group: Group, context: Context) -> Any:
        if context.rank == 1:
            return None
        with pytest.raises(ftcomm.Timeout) as caught:
            ftcomm.init(context.rank, 3, store=group.store(), job=group.job, timeout=2.0)
        assert "timeout" in str(caught.value)
        return caught.value.missing

    results = ranks.start(3, run, direct=False).results()
    assert [result.value for result in results] == [(1,), None, (1,)], "\n".join(r.text() for r in results)
    assert re.search(r"ftcomm: rank 0: waiting for ranks? [012, ]*1[012, ]* of 3 at the start of job", results[0].log)


def test_a_rank_that_fails_fails_all(ranks: Ranks) -> None:
    def run(group: Group, context: Context) -> str:
        heartbeat = 0.5 if context.rank == 1 else 1.0  # must be the same everywhere
        with pytest.raises(ftcomm.Error) as caught:
            ftcomm.init(
                context.rank,
                3,
                store=group.store(),
                job=group.job,
                options=ftcomm.Options(heartbeat=heartbeat),
                timeout=20,
            )
        return str(caught.value)

    for message in ranks(3, run, direct=False):
        assert "heartbeat" in message


@pytest.mark.parametrize("highest", [True, False], ids=["the hard limit is high", "the hard limit is low"])
def test_descriptors_for_all_links(ranks: Ranks, highest: bool) -> None:
    """A soft limit that is too low for one link to each rank is raised; where it can't be, that is said at once, and to all."""

    def run(group: Group, context: Context) -> int:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        low = len(os.listdir("/proc/self/fd")) + 20
        if context.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1] if highest else low))
        start = partial(ftcomm.init, context.rank, 12, store=group.store(), job=group.job, options=group.options)
        if highest:
            check(start())
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - low
        with pytest.raises(
            ftcomm.SystemFailure, match=rf"may have {low} files open .* links to 11 ranks .* raise the limit"
        ):
            start()
        return 0

    raised = ranks(12, run, direct=False, transport="tcp")
    assert (raised[1] > 0) == highest


def test_wrong_secret(ranks: Ranks) -> None:
    def run(group: Group, context: Context) -> str:
        options = ftcomm.Options(secret=str(context.rank) * 32, transport="tcp")
        with pytest.raises(ftcomm.Error) as caught:
            ftcomm.init(context.rank, 2, store=group.store(), job=group.job, options=options, timeout=3)
        return str(caught.value)

    for message in ranks(2, run, direct=False):
        assert "rank" in message.lower()


def test_right_secret(ranks: Ranks, transport: str) -> None:
    assert (
        ranks(2, lambda comm: comm.all_reduce(np.ones(3)).contributors, secret="s" * 32, transport=transport)
        == [(0, 1)] * 2
    )


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", ["rendezvous.gather", "start.link"])
def test_killed_during_the_start(ranks: Ranks, transport: str, point: str, victim: int) -> None:
    """After it has published its address: nobody waits for the timeout of the start, which is longer than the test's."""

    def run(group: Group, context: Context) -> tuple[int, ...]:
        with pytest.raises(ftcomm.Error) as caught:
            ftcomm.init(context.rank, 3, store=group.store(), job=group.job, options=group.options, timeout=600)
        context.mark("told")
        context.hold()  # whoever ends now is gone, too, for one who has not looked yet
        return caught.value.ranks

    alive = [rank for rank in range(3) if rank != victim]
    group = ranks.start(3, run, direct=False, transport=transport, faults=f"rank={victim},at={point},do=kill")
    for rank in alive:
        group.wait_for(rank, "told")
    for rank in alive:
        group.release(rank)
    values = ranks.values(group, {victim})
    assert [values[rank] for rank in alive] == [(victim,)] * 2


def test_killed_before_it_published_then_replaced(ranks: Ranks) -> None:
    """The replacement is a founding member in its place."""

    def run(group: Group, context: Context) -> int:
        comm = ftcomm.init(
            context.rank,
            2,
            store=group.store(),
            job=group.job,
            options=group.options,
            timeout=30,
            incarnation=context.incarnation,
        )
        return check(comm)

    group = ranks.start(2, run, direct=False, faults="rank=1,at=rendezvous.publish,do=kill")
    group.spawn(1, run, incarnation=1)
    results = group.results()
    assert [(r.rank, r.value) for r in results if r.status == 0] == [(0, 3), (1, 3)], "\n".join(
        r.text() for r in results
    )


def test_killed_when_it_had_linked_then_replaced(ranks: Ranks) -> None:
    """The others wait for its word that it has started. Its replacement knows that it never comes, and all are told."""

    def run(group: Group, context: Context) -> tuple[int, ...]:
        with pytest.raises(ftcomm.PeerFailure, match="Rank 1 died at the start of job") as caught:
            ftcomm.init(
                context.rank,
                3,
                store=group.store(),
                job=group.job,
                options=group.options,
                timeout=600,
                incarnation=context.incarnation,
            )
        return caught.value.ranks

    group = ranks.start(3, run, direct=False, policy="lossy", faults="rank=1,at=rendezvous.ready,do=kill")
    group.wait_ended(1)
    group.spawn(1, run, incarnation=1)
    results = group.results()
    assert [(r.rank, r.value) for r in results if r.status == 0] == [(rank, (1,)) for rank in range(3)], "\n".join(
        r.text() for r in results
    )


def test_two_jobs_at_once(ranks: Ranks, transport: str) -> None:
    first = ranks.start(3, lambda comm: comm.all_reduce(np.ones(100)).contributors, transport=transport)
    second = ranks.start(3, lambda comm: comm.all_reduce(np.ones(100)).contributors, transport=transport)
    assert Ranks.values(first) == Ranks.values(second) == [(0, 1, 2)] * 3


def test_two_jobs_in_one_process(ranks: Ranks) -> None:
    def run(comm: ftcomm.Communicator, context: Context) -> int:
        port = free_port() if comm.rank == 0 else 0
        place = np.array([port])
        comm.broadcast(place)
        other = ftcomm.init(comm.rank, 2, f"tcp://127.0.0.1:{place[0]}", job="other")
        buf = np.ones(3)
        other.all_reduce(buf)
        comm.all_reduce(buf)
        other.leave()
        return int(buf[0])

    assert ranks(2, run) == [4, 4]


def test_init_again_after_leave(ranks: Ranks) -> None:
    def run(group: Group, context: Context) -> list[int]:
        return [
            check(ftcomm.init(context.rank, 2, store=group.store(), job=f"{group.job}.{again}", timeout=20))
            for again in range(5)
        ]

    assert ranks(2, run, direct=False) == [[3] * 5] * 2


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ({}, {}, "No launcher is seen"),
        ({"init_method": "env://"}, {}, "RANK is not set"),
        ({"init_method": "env://"}, {"RANK": "x"}, "RANK is 'x'"),
        ({"init_method": "env://"}, {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"rank": 2, "world_size": 2, "init_method": "file:///nowhere/at/all"}, {}, "rank=2"),
        ({"rank": 0, "world_size": 0, "init_method": "env://"}, {"MASTER_ADDR": "x"}, "world_size=0|needs MASTER"),
        ({"rank": 0, "world_size": 2, "init_method": "smoke://signals"}, {}, "is not known"),
        ({"rank": 0, "world_size": 2, "init_method": "tcp://127.0.0.1"}, {}, "is not known"),
        ({"store": object()}, {}, "needs rank="),
        ({"store": "localhost:29500", "rank": 0, "world_size": 2}, {}, "'localhost:29500' is no store"),
        ({"rank": 0, "world_size": 1, "init_method": "env://"}, {"FTCOMM_INCARNATION": "-1"}, "FTCOMM_INCARNATION"),
        ({"rank": 0, "world_size": 1, "init_method": "env://"}, {"FTCOMM_JOB": "a b"}, "job name"),
        ({"rank": 0, "world_size": 1, "init_method": "env://"}, {"FTCOMM_POLICY": "x"}, "FTCOMM_POLICY"),
        (
            {"rank": 0, "world_size": 1, "init_method": "env://"},
            {"FTCOMM_FAULTS": "nonsense"},
            "nonsense|FTCOMM_FAULTS",
        ),
    ],
)
def test_wrong_settings(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], environment: dict[str, str], says: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ftcomm.ConfigError, match=says):
        ftcomm.init(**arguments)
    assert not ftcomm.is_initialized()


def python(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_has_no_side_effects() -> None:
    assert (
        python("""
        import os, sys, threading
        before = sorted(os.listdir("/proc/self/fd"))
        import ftcomm
        ftcomm.Options, ftcomm.PeerFailure, ftcomm.Communicator, ftcomm.init
        from ftcomm._lib import lib
        lib()
        assert sorted(os.listdir("/proc/self/fd")) == before
        assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
        print(sorted(m for m in ("torch", "numpy", "mpi4py") if m in sys.modules))
        """)
        == "[]"
    )


def test_exit_without_leave_is_a_goodbye() -> None:
    port = free_port()
    code = """
        import sys, ftcomm
        comm = ftcomm.init()
        comm.all_reduce(bytearray(8))
        if comm.rank == 0:
            try:
                while True: comm.all_reduce(bytearray(8))
            except ftcomm.PeerFailure as error:
                print(error.evidence)
    """
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0].strip() == "('left',)"


def test_who_leaves_does_not_say_that_it_was_voted_out(ranks: Ranks) -> None:
    """It may hear of the view without it before all have heard its goodbye."""

    def run(context: Context) -> list[str]:
        job = ftcomm.init(0, 1, "env://").job
        heard: list[str] = []
        job.add_listener(lambda event: heard.append(event["event"]))
        view = lib()[0].new("char[]", b'{"kind": "view"}'), lib()[0].new("char[]", b'{"kind": "stale"}')
        job._native_event(None, view[1])

        def while_it_leaves() -> None:
            for text in view:
                job._native_event(None, text)

        job.before_close(while_it_leaves)
        job.leave()
        return [what for what in heard if what in ("view", "stale")]

    assert ranks(1, run, direct=False) == [["stale", "view"]]


def test_alone_needs_no_store() -> None:
    assert python("import ftcomm; c = ftcomm.init(0, 1, 'env://'); b = bytearray(b'x'); c.all_reduce(b); print(b)") == (
        "bytearray(b'x')"
    )


def test_what_only_one_rank_finds_wrong_is_told_to_all(ranks: Ranks) -> None:
    """Its own interface is none: the others do not wait for it until the timeout."""

    def run(group: Group, context: Context) -> str:
        options = ftcomm.Options(transport="tcp", interface="none7" if context.rank == 1 else None)
        with pytest.raises(ftcomm.Error) as caught:
            ftcomm.init(context.rank, 3, store=group.store(), job=group.job, options=options, timeout=3600)
        return str(caught.value)

    for rank, message in enumerate(ranks(3, run, direct=False)):
        assert "none7" in message
        assert message.startswith("Rank 1 failed at the start") == (rank != 1)
