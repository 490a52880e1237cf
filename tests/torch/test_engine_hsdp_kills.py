"""The engine with FSDP2 over replicas (HSDP): two replicas of two shards each, kills at every phase of a step."""

from __future__ import annotations

import os
import random
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hsdp_training import DATA, SAMPLES, STEPS, build, ended, full, needs_reset, samples, train, undisturbed
from kept import Kept
from tables import most
from torch import nn

import ftcomm
from ftcomm.recovery.engine import gathered
from ftcomm.recovery.engine.restorable import reseed
from ftcomm.torch import groups

pytestmark = needs_reset


@pytest.fixture
def wanted(world: Any) -> Any:
    return undisturbed(world)["full"]


def test_as_without_the_engine(world: Any, wanted: Any) -> None:
    marks = undisturbed(world)["marks"]
    batches = {(rank, value[0]): value[2] for rank, name, value in marks if name == "batch"}

    def plain(context: Any) -> Any:
        net = build()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, foreach=False)
        for step in range(2 * STEPS):
            x, y, _ = DATA[batches[context.rank, step]]
            reseed(0, step, context.rank)
            nn.functional.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return full(net, optimizer)

    assert world(4, plain)[0] == wanted
    assert samples(marks, 0) == samples(marks, 1) == list(range(SAMPLES))


PHASES = ["between", "forward", "backward", "before-update", "update", "end"]


@pytest.mark.parametrize(("phase", "victim"), most([("forward", 2), ("update", 3)], product(PHASES, range(4))))
@pytest.mark.sample(1)
def test_a_kill_is_not_seen_in_the_result(world: Any, wanted: Any, phase: str, victim: int) -> None:
    values, job = ended(world, lambda context: train(context, phase, (victim,)))
    assert [value["full"] == wanted for value in values] == [True] * 4
    assert {value["steps"] for value in values} == {2 * STEPS}
    dropped = [0] if phase in ("update", "end") else [0, 1] if phase == "between" else [1]
    assert values[0]["progress"] in [{"step": 2 * STEPS, "dropped": n, "joined": 1, "lossy": 0} for n in dropped]
    assert samples(job.group._marks, 0) == samples(job.group._marks, 1) == list(range(SAMPLES))


@pytest.mark.parametrize(("phase", "victim"), [("backward", 1), ("update", 3)])
def test_shards_on_a_gpu(world: Any, gpu: str, phase: str, victim: int) -> None:
    values, _ = ended(world, lambda context: train(context, phase, (victim,), device=gpu))
    assert [value["full"] == undisturbed(world, gpu)["full"] for value in values] == [True] * 4


@pytest.mark.parametrize("phase", most(["backward"], ["update"]))
@pytest.mark.parametrize(
    "victims", [(0, 1), pytest.param((2, 3), marks=pytest.mark.table), pytest.param((0, 3), marks=pytest.mark.table)]
)
def test_two_with_different_shards_die(world: Any, wanted: Any, phase: str, victims: tuple[int, int]) -> None:
    """A whole replica, or one rank of each."""
    values, job = ended(world, lambda context: train(context, phase, victims))
    assert [value["full"] == wanted for value in values] == [True] * 4
    assert sum(job.incarnation) == 2


@pytest.mark.parametrize(
    "faults",
    [
        "rank=3.0,at=join.admit,do=kill",
        *(
            pytest.param(faults, marks=pytest.mark.table)
            for faults in ("rank=0.1,at=join.transfer.joiner,do=kill", "rank=0.1,at=join.request,do=kill")
        ),
    ],
)
def test_a_second_death_in_the_recovery(world: Any, wanted: Any, faults: str) -> None:
    values, job = ended(world, lambda context: train(context, "backward", (0,)), faults)
    assert [value["full"] == wanted for value in values] == [True] * 4
    assert sum(job.incarnation) == 2


@pytest.mark.table
@pytest.mark.parametrize("how", ["at once", "while it sends"])
def test_shards_that_nobody_has_any_more(world: Any, wanted: Any, tmp_path: Path, how: str) -> None:
    """Twins die: an error on all ranks, and the checkpoint is there to go on from."""
    both = how == "at once"

    def first(context: Any) -> str:
        with pytest.raises(ftcomm.PeerFailure) as caught:
            train(context, "backward", (0, 2) if both else (0,), checkpoint_dir=tmp_path, checkpoint_every=2)
        return str(caught.value)

    group = world.start(4, first, policy="lossy", faults="" if both else "rank=2.0,at=join.transfer.source,do=kill")
    for rank in (0, 2) if both else (0,):
        group.wait_ended(rank)
        world.replace(group, rank)
    values = [value for value in world.values(group, dies=(0, 2)) if value is not None]
    assert len(values) == (4 if both else 3)
    assert all("Nobody who is alive has the shards of rank 0: rank 0, 2 died" in value for value in values)
    assert [path.name[:14] for path in tmp_path.glob("*.pt")] == ["step-000000002"]
    values, _ = ended(world, lambda context: train(context, checkpoint_dir=tmp_path, checkpoint_every=2))
    assert [value["full"] == wanted for value in values] == [True] * 4


@pytest.mark.parametrize("victim", most([0], [1]))
def test_a_death_while_shards_are_gathered(world: Any, wanted: Any, tmp_path: Path, victim: int) -> None:
    """Of the rank that writes, or of one that sends: that checkpoint is left out."""

    def dying(context: Any) -> Any:
        if context.rank == victim and context.incarnation == 0:
            name = "_receive" if victim == 0 else "_send"
            setattr(gathered.Gathered, name, lambda *_: context.die())
        if context.rank == 0 and victim == 1:
            with pytest.warns(RuntimeWarning, match="without this checkpoint"):
                return train(context, checkpoint_dir=tmp_path, checkpoint_every=5)
        return train(context, checkpoint_dir=tmp_path, checkpoint_every=5)

    values, _ = ended(world, dying)
    assert [value["full"] == wanted for value in values] == [True] * 4
    assert sorted(path.name[:14] for path in tmp_path.glob("*.pt")) == ["step-000000010", "step-000000012"]


@pytest.mark.parametrize("kills", [pytest.param(20, marks=pytest.mark.table)])
def test_random_kills(world: Any, kills: int) -> None:
    """At any moment. Every other time a rank with other shards dies as well, maybe in the recovery."""
    rng = random.Random(kills)
    epochs = 4 * kills
    job = Kept(world, lambda context: train(context, epochs=epochs))
    killed = 0
    while killed < kills and job.step():
        trains = {(r, i) for r, name, i in job.group._marks if name == "trains"}
        if all((r, job.incarnation[r]) in trains for r in range(4)) and rng.random() < 0.03:
            victim = rng.randrange(4)
            for rank in (victim, victim ^ 1)[: 1 + killed % 2]:
                job.group.kill(rank, incarnation=job.incarnation[rank])
                killed += 1
                job.group.wait_ended(rank, job.incarnation[rank])
                for _ in range(rng.randrange(4)):
                    job.step()
    values = job.values()
    assert killed >= kills
    assert {value["progress"]["joined"] for value in values} == {killed}
    assert {value["steps"] for value in values} == {epochs * STEPS}
    assert all(samples(job.group._marks, epoch) == list(range(SAMPLES)) for epoch in range(epochs))
    quiet, _ = ended(world, lambda context: train(context, epochs=epochs))
    assert all(value["full"] == quiet[0]["full"] for value in values)


@pytest.mark.table
def test_an_exception_that_ends_a_rank_is_a_death(world: Any, wanted: Any) -> None:
    def failing(context: Any) -> Any:
        if context.rank == 1 and context.incarnation == 0:
            job = groups.job_of(groups.backend_of())

            def die() -> None:
                sys.last_type = ValueError  # as when Python ends with it
                os._exit = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # as Kept expects of who dies
                job.leave_at_exit()

            context.die = die
        return train(context, "before-update", (1,))

    values, _ = ended(world, failing)
    assert [value["full"] == wanted for value in values] == [True] * 4
