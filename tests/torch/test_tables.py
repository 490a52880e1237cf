"""The kill tables through torch: a sample of native points under DDP, and those that only a join point passes."""

from __future__ import annotations

import functools
import hashlib
from multiprocessing.connection import wait
from typing import Any

import kill_table as table
import pytest
import torch
import torch.distributed as dist
from kill_table import cells
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftcomm
import ftcomm.torch

pytestmark = [pytest.mark.table, pytest.mark.usefixtures("pulls")]

SAMPLE = (
    "ring.enter",
    "ring.rs.hop",
    "ring.ag.hop",
    "pull.reduce",
    "pull.final",
    "fence.round",
    "flat.send",
    "flat.done",
    "tcp.send",
    "shm.commit",
)
SAMPLE_OF_RECOVERY = ("vote.send", "decide.before")
STEPS, KILL_AT = 6, 3


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 700), nn.Linear(700, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def loss_of(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return net(torch.randn(4, 64)).square().mean()


def digest(net: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()


def trained_alone(size: int, victim: int) -> nn.Module:
    """The reference: one process that averages the gradients of those who were there at each step."""
    net, optimizer = make()
    for step in range(STEPS):
        there = [r for r in range(size) if r != victim or step < KILL_AT]
        optimizer.zero_grad()
        for rank in there:
            (loss_of(net, step, rank) / len(there)).backward()
        optimizer.step()
    return net


def train(context: Any, without: int | None = None) -> Any:
    """``without``: this rank was there up to KILL_AT; compares with the reference."""
    net, optimizer = make()
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, ftcomm.torch.lossy_hook)
    for _ in range(STEPS):
        here = ftcomm.torch.join_point(model, optimizer)
        optimizer.zero_grad()
        loss_of(model, here.step, dist.get_rank()).backward()
        optimizer.step()
    if without is not None:
        reference = trained_alone(len(here.alive) + 1, without)
        for got, want in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return digest(net)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("point", "transport"), cells("step"))
@pytest.mark.parametrize("role", ["first", "last"])
def test_kill_at_a_training_step(world: Any, size: int, point: str, transport: str, role: str) -> None:
    """A death between two steps: who contributes to which is known, so the survivors' weights are those of the reference."""
    victim = 0 if role == "first" else size - 1
    fault = f"rank={victim},at={point}:{KILL_AT},do=kill"
    run = functools.partial(train, without=victim)
    group = world.start(size, run, policy="lossy", transport=transport, heartbeat=table.HEARTBEAT, faults=fault)
    table.judge(group.results(120), {victim}, {victim}, point, transport)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("point", "transport"), cells(*SAMPLE, *SAMPLE_OF_RECOVERY))
@pytest.mark.parametrize("role", ["first", "last"])
def test_kill_under_ddp(world: Any, size: int, point: str, transport: str, role: str) -> None:
    victim = 0 if role == "first" else size - 1
    first_dies = size - 1 - victim if point in SAMPLE_OF_RECOVERY else None
    fault = f"rank={victim},at={point},step={KILL_AT},do=kill"
    if first_dies is not None:
        if size == 2:
            pytest.skip("nobody would be left")
        fault += f";rank={first_dies},at=ring.rs.hop,step={KILL_AT},do=kill"
    group = world.start(size, train, policy="lossy", transport=transport, heartbeat=table.HEARTBEAT, faults=fault)
    may_die = {victim} if first_dies is None else {victim, first_dies}
    table.judge(group.results(120), may_die, {victim}, point, transport)


def refilled(context: Any) -> Any:
    """Slot 2 dies and comes back; ends four steps after a replacement of it has come in."""
    net, optimizer = make()
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, ftcomm.torch.lossy_hook)
    end = None
    if context.incarnation:
        context.mark("here")
    while True:
        here = ftcomm.torch.join_point(model, optimizer, extra={"end": end})
        end = here.extra["end"] if end is None else end
        if 2 in here.joined:
            end = here.step + 4
        if here.step == end:
            return digest(net), here.alive
        if here.step == 2 and dist.get_rank() == 2 and context.incarnation == 0:
            context.die()
        if here.step == 2 and dist.get_rank() == 1:
            context.mark("waiting")
            context.hold()
        optimizer.zero_grad()
        loss_of(model, here.step, dist.get_rank()).backward()
        optimizer.step()


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize(("point", "transport"), cells("join.transfer."))
@pytest.mark.parametrize("nth", [1, 2])
def test_kill_in_a_transfer(world: Any, size: int, point: str, transport: str, nth: int) -> None:
    """The source's place is taken by another survivor; a joiner's by another replacement."""
    joiner = point.endswith("joiner")
    victim = "2.1" if joiner else "0"
    fault = f"rank={victim},at={point}:{nth},do=kill"
    group = world.start(size, refilled, policy="lossy", transport=transport, heartbeat=table.HEARTBEAT, faults=fault)
    group.wait_for(1, "waiting")
    world.replace(group, 2)
    group.wait_for(2, "here")
    group.release(1)
    if joiner:
        assert wait([group._processes[2, 1].pidfd], 60.0)
        world.replace(group, 2, 2)
    results = group.results(120)
    dead = {(r.rank, r.incarnation) for r in results if r.status == -9}
    alive = [r for r in results if (r.rank, r.incarnation) not in dead]
    victims = {(2, 1) if joiner else (0, 0)}
    assert dead - victims == {(2, 0)}, table.text_of(results)
    assert all(r.ok for r in alive), table.text_of(results)
    assert len({str(r.value) for r in alive}) == 1, table.text_of(results)
    table.record(point, transport, victims <= dead)  # of eight, another rank than the first gives the blocks
