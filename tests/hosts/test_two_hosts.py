"""Shared memory inside a host, sockets between hosts, the store as the authority; and what can happen to a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Context, Group, Ranks
from network import SECRET, Network

import ftcomm

Comm = ftcomm.Communicator
Make = Callable[..., Network]
Body = Callable[[Comm, Context], Any]


def start(ranks: Ranks, network: Network, layout: list[int], body: Body, **options: Any) -> Group:
    """``layout[rank]`` is the rank's host; ``body(comm, context)`` runs on each."""

    def run(group: Group, context: Context) -> Any:
        host = layout[context.rank]
        store = network.enter(host)
        comm = ftcomm.init(
            context.rank,
            group.size,
            store=store,
            job=group.job,
            incarnation=context.incarnation,
            options=dataclasses.replace(group.options, host=f"host-{host}"),
            timeout=30,
        )
        value = body(comm, context)
        comm.leave()
        return value

    return ranks.start(len(layout), run, direct=False, secret=SECRET, **options)


def total(comm: Comm, count: int = 30_000) -> tuple[float, tuple[int, ...]]:
    data = np.full(count, float(comm.slots[comm.rank]))
    outcome = comm.all_reduce(data)
    assert (data == data[0]).all()
    return float(data[0]), outcome.contributors


def until_failure(comm: Comm) -> ftcomm.PeerFailure:
    while True:
        try:
            total(comm)
        except ftcomm.PeerFailure as failure:
            return failure


def test_shm_inside_tcp_between(ranks: Ranks, network: Make) -> None:
    def body(comm: Comm, context: Context) -> Any:
        gathered = np.zeros(4)
        comm.all_gather(gathered, np.array([float(comm.rank)]))
        assert gathered.tolist() == [0, 1, 2, 3]
        swapped = np.zeros(4000)
        comm.all_to_all(swapped, np.full(4000, float(comm.rank)))
        assert swapped.reshape(4, -1).max(axis=1).tolist() == [0, 1, 2, 3]
        return total(comm, 1_000_000), total(comm, 3), comm.job.info()

    group = start(ranks, network(2), [0, 0, 1, 1], body)
    for large, small, info in ranks.values(group):
        assert large == small == (6.0, (0, 1, 2, 3))
        assert info["authority"] == "store", info
        assert sorted(info["links"]) == ["self", "shm", "tcp", "tcp"], info


@pytest.mark.parametrize("policy", ["raise", "lossy"])
def test_a_death_is_confirmed_by_a_fellow_rank(ranks: Ranks, network: Make, policy: str) -> None:
    """M6: the heartbeat is far too long to have a part in it."""

    def body(comm: Comm, context: Context) -> Any:
        total(comm)
        if comm.rank == 2:
            context.die()
        if policy == "lossy":
            while len(total(comm)[1]) == 4:
                pass
            return total(comm)
        failure = until_failure(comm)
        assert failure.ranks == (2,)
        return failure.evidence, total(comm.shrink())

    group = start(ranks, network(2), [0, 0, 1, 1], body, policy=policy, heartbeat=25.0)
    values = ranks.values(group, dies={2})
    del values[2]
    if policy == "lossy":
        assert values == [(4.0, (0, 1, 3))] * 3
    else:
        assert [v[1] for v in values] == [(4.0, (0, 1, 2))] * 3
        for evidence, _ in values:
            assert "heartbeat" not in str(evidence), values


def test_a_lost_host_is_one_failure(ranks: Ranks, network: Make) -> None:
    """M12: its ranks fall silent together, and leave in one change of the view."""

    def body(comm: Comm, context: Context) -> Any:
        before = comm.job.epoch
        total(comm)
        context.mark("ready")
        failure = until_failure(comm)
        rest = comm.shrink()  # a failure may be told by another rank before the view has come here
        changes = (
            comm.job.epoch - before
        )  # before the next all-reduce: once it is done, a rank may leave, a change as well
        return failure.ranks, changes, total(rest)

    network = network(3)
    group = start(ranks, network, [0, 0, 1, 1, 2], body, heartbeat=1.0)
    for rank in range(5):
        group.wait_for(rank, "ready")
    network.link(1, "down")  # first: no goodbye of a dying socket gets out
    group.kill(2)
    group.kill(3)
    values = ranks.values(group, dies={2, 3})
    assert [values[r] for r in (0, 1, 4)] == [((2, 3), 1, (5.0, (0, 1, 2)))] * 3


def test_a_host_that_is_cut_off(ranks: Ranks, network: Make) -> None:
    """The side with the store goes on; the other one can't decide anything, and says so."""

    def body(comm: Comm, context: Context) -> Any:
        total(comm)
        context.mark("ready")
        try:
            failure = until_failure(comm)
            comm = comm.shrink()
        except ftcomm.Error as error:
            return type(error).__name__
        return failure.ranks, total(comm)

    network = network(2)
    group = start(ranks, network, [0, 0, 1, 1], body, heartbeat=0.5, timeout=20.0)
    for rank in range(4):
        group.wait_for(rank, "ready")
    network.link(1, "down")
    results = group.results()
    assert [r.value for r in results[:2]] == [((2, 3), (1.0, (0, 1)))] * 2, "\n".join(r.text() for r in results)
    assert {r.value for r in results[2:]} <= {"NoAuthority", "StaleEpoch"}, "\n".join(r.text() for r in results)


def test_a_short_outage_is_healed(ranks: Ranks, network: Make) -> None:
    """Shorter than the heartbeat: nobody is suspected and nothing is lost."""

    def body(comm: Comm, context: Context) -> Any:
        context.mark("ready")
        sums = [total(comm) for _ in range(200)]
        context.mark("half")
        context.hold()
        return set(sums) | {total(comm) for _ in range(200)}, comm.job.epoch

    network = network(2)
    group = start(ranks, network, [0, 0, 1, 1], body, heartbeat=20.0)
    for rank in range(4):
        group.wait_for(rank, "ready")
    network.link(0, "down")
    network.link(0, "up")
    for rank in range(4):
        group.wait_for(rank, "half")
    network.link(1, "down")
    for rank in range(4):
        group.release(rank)
    network.link(1, "up")
    assert ranks.values(group) == [({(6.0, (0, 1, 2, 3))}, 1)] * 4


def test_the_stores_machine_dies(ranks: Ranks, network: Make) -> None:
    """Work goes on without it; a death then can't be decided upon, which is an error on all and no hang."""

    def body(comm: Comm, context: Context) -> Any:
        total(comm)
        context.mark("ready")
        context.hold()
        assert total(comm) == (6.0, (0, 1, 2, 3))
        context.mark("worked")
        context.hold()
        if comm.rank == 3:
            context.die()
        try:
            while True:
                total(comm)
        except ftcomm.NoAuthority as error:
            return str(error)

    network = network(2)
    group = start(ranks, network, [0, 0, 1, 1], body, heartbeat=1.0)
    for rank in range(4):
        group.wait_for(rank, "ready")
    network.kill_store()
    for rank in range(4):
        group.release(rank)
    for rank in range(4):
        group.wait_for(rank, "worked")
    for rank in range(4):
        group.release(rank)
    values = ranks.values(group, dies={3})
    assert all("store" in text for text in values[:3]), values


def test_a_replacement_on_another_host(ranks: Ranks, network: Make) -> None:
    layout = [0, 0, 1, 1]

    def body(comm: Comm, context: Context) -> Any:
        if context.incarnation:
            comm.job.join_wait().wait()
        else:
            if comm.rank == 2:
                context.die()
            while len(total(comm)[1]) == 4:
                pass
            comm.ack_failed()
            context.mark("without")
            context.hold()
            while comm.agree(int(comm.job.waiting() == (2,))) != 1:
                pass
            comm.job.admit().wait()
        return total(comm)

    network = network(3)
    group = start(ranks, network, layout, body, policy="lossy")
    for rank in (0, 1, 3):
        group.wait_for(rank, "without")
    layout[2] = 2  # where it is started now
    again = group.fn
    group.spawn(2, again, incarnation=1)
    for rank in (0, 1, 3):
        group.release(rank)
    results = group.results()
    assert [r.value for r in results if (r.rank, r.incarnation) != (2, 0)] == [(6.0, (0, 1, 2, 3))] * 4, "\n".join(
        r.text() for r in results
    )


def test_ipv6_alone_and_a_chosen_interface(ranks: Ranks, network: Make) -> None:
    group = start(ranks, network(2, ipv4=False), [0, 1], lambda comm, _: total(comm), interface="eth0")
    assert ranks.values(group) == [(1.0, (0, 1))] * 2


def test_an_interface_that_is_not_there(ranks: Ranks, network: Make) -> None:
    def body(comm: Comm, context: Context) -> Any:
        raise AssertionError("started")

    group = start(ranks, network(2), [0, 1], body, interface="eth7")
    results = group.results()
    assert all("eth7" in str(r.error) for r in results), "\n".join(r.text() for r in results)
