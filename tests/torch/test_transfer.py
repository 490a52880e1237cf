"""The state of a training comes from all survivors at once, and what has come stays, whoever dies."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ftcomm
import ftcomm.torch
from ftcomm.torch import groups, transfer, transfer_plan
from ftcomm.torch.blocks import Blocks, checksum


def training(context: Any, victims: tuple[int, ...] = (3,), odd: str = "") -> Any:
    """The victims die in step 3; rank 1 waits for their replacements. Ends five steps after all of them have come in."""
    transfer_plan.CHUNK, transfer_plan.DIRECT, transfer_plan.SMALL = 128 << 10, 64 << 10, 0
    transfer.cores = lambda: 8
    rank = context.rank
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(500, 700), nn.BatchNorm1d(700), nn.Linear(700, 4))
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, ftcomm.torch.lossy_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job = groups.job_of(groups.backend_of())
    job.add_listener(lambda event: event["event"] == "join-waiting" and context.mark("somebody waits"))
    more = {}
    if (odd == "sums" and rank == 2) or (odd == "all sums" and rank < 3):
        transfer.checksum = lambda data: checksum(data) ^ 1
    if odd == "layout" and rank == 2:
        more["mine"] = torch.zeros(3)
    if context.incarnation:
        context.mark("here")
    end, died = 12 if odd == "all sums" else None, False
    while True:
        if rank == 1 and died:
            context.hold()
            died = False
        here = ftcomm.torch.join_point(model, optimizer, extra={"end": end, **more})
        end = here.extra["end"] if end is None else end
        if here.joined and {*victims} <= {*here.alive}:
            end = here.step + 5
        if here.step == end:
            return [[p.double().sum().item() for p in (*net.parameters(), *_moments(optimizer))], list(here.alive)]
        if here.step == 3 and rank in victims and context.incarnation == 0:
            context.die()
        died = here.step == 3 and rank == 1
        torch.manual_seed(10 * here.step + rank)
        model(torch.randn(4, 500)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _moments(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def run(
    world: Any, events: Any, faults: str, victims: tuple[int, ...] = (3,), odd: str = "", again: int | None = None
) -> Any:
    """Returns what those who came in tell of it, and who was there in the end."""
    group = world.start(
        3 + len(victims),
        lambda context: training(context, victims, odd),
        policy="lossy",
        faults=faults,
        events=str(events),
    )
    for victim in victims:
        group.wait_ended(victim)
        world.replace(group, victim)
    for _ in victims:
        group.wait_for(1, "somebody waits")
    group.release(1)
    if again is not None:
        group.wait_ended(again)
        world.replace(group, again, 2)
    results = group.results()
    alive = [result.value for result in results if result.value is not None]
    assert alive, [result.text() for result in results]
    assert all(value == alive[0] for value in alive), [result.text() for result in results]
    lines = [json.loads(line) for path in sorted(events.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == "rejoined"], alive[0][1]


def test_all_survivors_send(world: Any, events: Any) -> None:
    (moved,), alive = run(world, events, "")
    assert alive == [0, 1, 2, 3]
    assert (moved["sources"], moved["rounds"], moved["damaged"]) == ([0, 1, 2], 1, 0)
    assert moved["moved"] == moved["bytes"] > 20 * (128 << 10)


@pytest.mark.parametrize("source", [0, 2], ids=["leads", "another"])
def test_a_source_dies(world: Any, events: Any, source: int) -> None:
    """Only what it had not sent comes from the others."""
    (moved,), alive = run(world, events, f"rank={source}.0,at=join.transfer.source:6,do=kill")
    assert alive == [rank for rank in range(4) if rank != source]
    assert {*moved["sources"]} >= {*alive} - {3}
    assert (moved["rounds"], moved["damaged"]) == (2, 0)
    assert moved["bytes"] <= moved["moved"] < moved["bytes"] + (16 << 10)  # buffers have to be of one rank


def test_the_newcomer_dies(world: Any, events: Any) -> None:
    (moved,), alive = run(world, events, "rank=3.1,at=join.transfer.joiner:6,do=kill", again=3)
    assert alive == [0, 1, 2, 3]
    assert moved["incarnation"] == 2
    assert moved["moved"] == moved["bytes"]


def test_a_source_of_two_newcomers_dies(world: Any, events: Any) -> None:
    moved, alive = run(world, events, "rank=2.0,at=join.transfer.source:9,do=kill", victims=(3, 4))
    assert alive == [0, 1, 3, 4]
    assert [(line["slot"], line["rounds"], line["moved"] == line["bytes"]) for line in moved] == [
        (3, 2, True),
        (4, 2, True),
    ]


@pytest.mark.parametrize("piece", ["rank=0,at=join.transfer.source:1", "rank=2,at=join.transfer.source:2"])
def test_a_piece_comes_damaged(world: Any, events: Any, piece: str) -> None:
    """The header, or a block: it comes again, once."""
    (moved,), alive = run(world, events, f"{piece},do=corrupt")
    assert alive == [0, 1, 2, 3]
    assert (moved["damaged"], moved["rounds"], moved["moved"]) == (1, 2, moved["bytes"])


@pytest.mark.parametrize("odd", ["sums", "layout"])
def test_a_source_that_is_of_no_use(world: Any, events: Any, odd: str) -> None:
    """What it sends is always damaged, or not of what the others have: all comes from the others."""
    (moved,), alive = run(world, events, "", odd=odd)
    assert alive == [0, 1, 2, 3]
    assert (moved["sources"], moved["moved"]) == ([0, 1], moved["bytes"])
    assert (moved["damaged"] > 3) == (odd == "sums")


def test_two_damaged_copies_are_an_error(world: Any, events: Any) -> None:
    def told(context: Any) -> Any:
        if context.rank < 3:
            return training(context, odd="all sums")
        with pytest.raises(ftcomm.SystemFailure) as caught:
            training(context)
        return str(caught.value)

    group = world.start(4, told, policy="lossy")
    group.wait_ended(3)
    world.replace(group, 3)
    group.wait_for(1, "somebody waits")
    group.release(1)
    group.wait_ended(3, 1)
    text = next(result.value for result in group.results() if (result.rank, result.incarnation) == (3, 1))
    assert "the header came with a wrong checksum twice, from rank 0 and then from rank 1" in text


def test_blocks_of_any_tensors() -> None:
    """Of any type and order in memory; each side has its own."""
    torch.manual_seed(1)
    image = torch.randn(8, 96, 30, 30)
    sent = [
        torch.randn(700, 900),
        image.to(memory_format=torch.channels_last),
        torch.randn(900, 700).t(),
        torch.tensor(3.5),
        torch.empty(0),
        torch.arange(5) > 2,
        torch.randn(300, dtype=torch.complex64),
        torch.randn(2_000_000).to(torch.bfloat16),
        torch.randn(11, 13).t(),
    ]
    got = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in sent]
    got[0] = torch.zeros(900, 700).t()
    got[1] = torch.zeros_like(sent[1])
    of, to = Blocks(sent, own={3}), Blocks(got, own={3})
    assert of.plan == to.plan
    for number in reversed(range(len(of.plan))):
        room = to.room(number)
        room.copy_(of.read(number))
        to.put(number, room)
    to.finish()
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
    assert any(
        to.room(number).data_ptr() == got[7].data_ptr() for number in range(len(to.plan))
    )  # received in its place
