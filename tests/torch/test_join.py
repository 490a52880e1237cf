"""Replacements come in at a join point and are bitwise equal to the survivors from there on."""

from __future__ import annotations

import inspect
import json
from contextlib import nullcontext
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ftcomm
import ftcomm.torch
from ftcomm.torch import groups

LAST = 30


def training(
    context,
    *,
    die_at=5,
    victim=2,
    until=None,
    make=None,
    hook=True,
    accumulate=False,
    wide=32,
    optim="adam",
    pairs=False,
):
    """Trains until LAST steps after the victim's replacement has come in; returns a digest of each rank's weights."""
    rank = context.rank
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, wide), nn.ReLU(), nn.BatchNorm1d(wide), nn.Linear(wide, wide), nn.Linear(wide, 4))
    model = (make or DistributedDataParallel)(net)
    if hook:
        model.register_comm_hook(None, ftcomm.torch.lossy_hook)
    optimizer = torch.optim.Adam(model.parameters()) if optim == "adam" else torch.optim.SGD(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    if pairs:  # every rank makes both, as torch wants it; a replacement makes them again
        unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
        groups = {0: dist.new_group([0, victim]), 1: dist.new_group([1, victim], **unsorted)}
        mine = [groups[r] for r in (0, 1) if rank in (r, victim)]
    end = LAST
    came, history = [], []
    while True:
        here = ftcomm.torch.join_point(model, optimizer, extra={"end": end, "lr": scheduler, "note": torch.arange(3)})
        if here.joined:
            came += here.joined
            end = here.step + 8
        elif here.extra:
            end = here.extra["end"]
        history.append(here.step)
        if here.step >= end and came:
            break
        if here.step == die_at and rank == victim and context.incarnation == 0:
            context.die()
        if here.step == die_at + 2 and not came and rank == min(here.alive):
            context.mark("missed")
            context.hold()
        for micro in range(2 if accumulate else 1):
            torch.manual_seed(1000 * here.step + 10 * rank + micro)
            with model.no_sync() if accumulate and micro == 0 else nullcontext():
                model(torch.randn(8, 16)).square().mean().backward()
        if pairs:
            for group in mine:
                told = torch.tensor([1.0 + rank])
                dist.all_reduce(told, group=group)
                full = told.item() == sum(1 + r for r in dist.get_process_group_ranks(group))
                assert full or told.item() == 1.0 + rank  # alone
                assert full or victim not in here.alive or here.step == die_at, (here.step, told)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert history == list(range(history[0], history[0] + len(history)))
    assert len(here.alive) == dist.get_world_size()
    state = [p.double().sum().item() for p in net.parameters()]  # buffers are each rank's own until the next forward
    moments = [v.double().sum().item() for s in optimizer.state.values() for v in s.values()]
    return [state, moments, scheduler.get_last_lr(), here.step, sorted(set(came))]


def run(world, size, victim=2, spawn=True, settings=None, faults="", **options):
    settings = settings or {}
    group = world.start(
        size, lambda context: training(context, victim=victim, **settings), policy="lossy", faults=faults, **options
    )
    missing = min(r for r in range(size) if r != victim)
    group.wait_for(missing, "missed")
    world.replace(group, victim)
    group.release(missing)
    values = world.values(group, dies=(victim,))
    survivors = [r for r in range(size) if r != victim]
    # results are in the order of (rank, incarnation): the victim's own value is None
    alive = [v for v in values if v is not None]
    assert len(alive) == size
    assert all(v == alive[0] for v in alive), alive
    assert alive[0][-1] == [victim]
    return survivors


def test_replacement(world):
    run(world, 3)


def test_rank_0_replaced(world):
    run(world, 3, victim=0)


def test_over_tcp(world):
    run(world, 3, transport="tcp")


@pytest.mark.parametrize(
    "settings",
    [
        {"make": lambda net: DistributedDataParallel(net, static_graph=True)},
        {"make": lambda net: DistributedDataParallel(net, bucket_cap_mb=0.001)},
        {"make": lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True)},
        {"make": lambda net: DistributedDataParallel(net, find_unused_parameters=True)},
        {"accumulate": True},
        {"wide": 700},
        {"pairs": True},
    ],
    ids=["static-graph", "many-buckets", "bucket-view", "find-unused", "no-sync", "large", "subgroups"],
)
@pytest.mark.sample(3)
def test_settings(world, settings):
    run(world, 3, settings=settings)


def with_power_sgd(net):
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    return model


def test_power_sgd(world):
    run(world, 2, victim=1, settings={"make": with_power_sgd, "hook": False})


def test_events(world, events):
    run(world, 3, events=str(events))
    lines = [json.loads(line) for path in events.glob("*.jsonl") for line in path.read_text().splitlines()]
    moved = [line for line in lines if line["event"] == "rejoined"]
    assert [(line["slot"], line["incarnation"]) for line in moved] == [(2, 1)]
    assert moved[0]["bytes"] > 0
    assert moved[0]["seconds"] > 0


@pytest.mark.parametrize("point", ["join.transfer.source:1", "join.transfer.source:2"])
def test_source_killed_in_mid_transfer(world, point):
    """Rank 0 hands over first; when it dies, rank 1 does. Rank 0 stays vacant."""
    group = world.start(
        3,
        last_ones,
        policy="lossy",
        faults=f"rank=0,at={point},do=kill",
    )
    group.wait_for(1, "waiting")
    world.replace(group, 2)
    group.wait_for(2, "here")
    group.release(1)
    values = world.values(group, dies=(0, 2))
    alive = [v for v in values if v is not None]
    assert len(alive) == 2
    assert alive[0] == alive[1]
    assert alive[0][1] == [1, 2]


@pytest.mark.parametrize("point", ["join.transfer.joiner:1", "join.transfer.joiner:2"])
def test_joiner_killed_in_mid_transfer(world, point):
    """The first replacement dies while it receives; a second one comes in."""
    group = world.start(3, last_ones, policy="lossy", faults=f"rank=2.1,at={point},do=kill")
    group.wait_for(1, "waiting")
    world.replace(group, 2)
    group.wait_for(2, "here")
    group.release(1)
    assert wait([group._processes[2, 1].pidfd], 30.0)  # it is dead
    world.replace(group, 2, 2)
    results = group.results()
    alive = [r.value for r in results if r.value is not None]
    assert len(alive) == 3
    assert alive[0] == alive[1] == alive[2]
    assert alive[0][1] == [0, 1, 2]


def last_ones(context):
    """Rank 2 dies; rank 1 waits at its join points until the test has what it wants; ends five steps after somebody came in."""
    rank = context.rank
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(1000, 700), nn.Linear(700, 4))
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, ftcomm.torch.lossy_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    end, died = None, False
    if context.incarnation:
        context.mark("here")
    while True:
        if rank == 1 and died:
            context.mark("waiting")
            context.hold()
            died = False
        here = ftcomm.torch.join_point(model, optimizer, extra={"end": end})
        end = here.extra["end"] if end is None else end
        if here.joined and 2 in here.alive:
            end = here.step + 5
        if here.step == end:
            break
        if here.step == 3 and rank == 2 and context.incarnation == 0:
            context.die()
        if here.step == 3 and rank == 1:
            died = True
        torch.manual_seed(10 * here.step + rank)
        model(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [v.double().sum().item() for s in optimizer.state.values() for v in s.values()]
    return [[p.double().sum().item() for p in net.parameters()] + moments, list(here.alive)]


def refused(context):
    with pytest.raises(ftcomm.ConfigError, match="sharded"):
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(nn.Linear(8, 8))
        ftcomm.torch.state.TrainingState(model, None, None)
    with pytest.raises(ftcomm.ConfigError, match="ZeroRedundancy"):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        plain = nn.Linear(8, 8)
        zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
        ftcomm.torch.state.TrainingState(plain, zero, None)
    steps = [ftcomm.torch.join_point(plain, None).step for _ in range(3)]
    assert steps == [0, 1, 2]
    with pytest.raises(ftcomm.ConfigError, match="another model of this process group.*ModuleDict"):
        ftcomm.torch.join_point(nn.Linear(8, 8))
    assert ftcomm.torch.join_point(plain).step == 3
    ftcomm.torch.join_point(nn.parallel.DistributedDataParallel(plain, process_group=torch.distributed.new_group()))


def test_refusals_and_plain_modules(world):
    world(2, refused)


def test_a_newcomer_that_goes_before_it_is_in_is_not_let_in(world):
    """Nobody has heard a goodbye of it, as it was never there: its end is seen all the same."""

    def waiting(context):
        job = groups.job_of(groups.backend_of())
        if context.rank == 1 and context.incarnation == 0:
            context.die()
        if context.rank == 1:
            job.join_wait()
            context.mark("asks")
            context.hold()
            groups.leave(job)
            return None
        job.add_listener(lambda event: event["event"] == "join-waiting" and context.mark("waits"))
        context.mark("ready")
        context.hold()
        while job.waiting():  # of an end before it was in there is no event
            job.alive()
        job.admit().wait()
        return job.alive()

    group = world.start(2, waiting, policy="lossy")
    group.wait_for(0, "ready")
    group.wait_ended(1)
    world.replace(group, 1)
    group.wait_for(0, "waits")
    group.wait_for(1, "asks")
    group.release(1, incarnation=1)
    group.wait_ended(1, 1)
    group.release(0)
    assert world.values(group, dies=(1,))[0] == (0,)
