"""torch.distributed.pipelining under the policy replay: whichever stage is killed, losses and parameters are those of an
undisturbed run, bit for bit."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import pytest
from tables import most

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch_store as torch_store_process
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_keeper import Keep, TorchKeeper, kept

STAGES = 4
WIDTH = 24
POINTS = [
    "channel.send.before",
    "channel.send.logged",
    "channel.send.marked",
    "channel.receive",
    "log.payload.before",
    "log.payload.after",
    "log.header.before",
    "log.header.after",
    "log.watermark.before",
    "log.watermark.after",
]
SCHEDULES = {"1F1B": pipelining.Schedule1F1B, "GPipe": pipelining.ScheduleGPipe}

Result = tuple[list[float], str, list[float]]


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


@pytest.fixture
def keep(ranks: harness.Ranks, torch_store: tuple[str, int]) -> Iterator[Keep]:
    yield from kept(ranks, torch_store, STAGES)


_known: dict[tuple[str, int], list[Result]] = {}


@pytest.fixture
def undisturbed(keep: Keep) -> Callable[[str, int], list[Result]]:
    def run(schedule: str, steps: int) -> list[Result]:
        if (schedule, steps) not in _known:
            _known[schedule, steps] = keep(training(schedule, steps)).values()
        return _known[schedule, steps]

    return run


def training(schedule: str, steps: int, device: str = "cpu") -> Callable[[Any], Result]:
    """What a user writes: nothing in it knows of failures, but for the mark that the test waits for."""

    def run(context: harness.Context) -> Result:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)).to(device)
        stage = pipelining.PipelineStage(layers, rank, size, torch.device(device))
        pipeline = SCHEDULES[schedule](stage, 2 * size, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2)
        ends = dist.new_group([0, size - 1])  # as for tied embeddings
        told = []
        losses: list[float] = []
        for step in range(steps):
            inputs = torch.randn(4 * size, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
            optimizer.zero_grad()
            parts: list[torch.Tensor] = []
            if rank == 0:
                pipeline.step(inputs)
            elif rank == size - 1:
                pipeline.step(target=inputs.sin(), losses=parts)
            else:
                pipeline.step()
            if rank in (0, size - 1):
                bias = layers[0].bias
                assert bias.grad is not None
                dist.all_reduce(bias.grad, group=ends)
            optimizer.step()
            losses += [part.item() for part in parts]
            if step % 4 == 0:
                box = [losses[-1] if losses else None]
                dist.broadcast_object_list(box, src=size - 1)
                told.append(box[0])
            context.mark("step", step)
        weights = b"".join(p.detach().cpu().numpy().tobytes() for p in layers.parameters())
        return losses, hashlib.sha256(weights).hexdigest(), told

    return run


def interleaved(schedule: str, steps: int = 10) -> Callable[[Any], str]:
    """Two stages on each rank: several receives from one rank wait at the same time."""

    def run(context: harness.Context) -> str:
        torch.use_deterministic_algorithms(True)
        rank, size = dist.get_rank(), dist.get_world_size()
        v_shaped = schedule == "ZBVZeroBubble"
        numbers = [rank, 2 * size - 1 - rank if v_shaped else rank + size]
        modules, stages = [], []
        for number in numbers:
            torch.manual_seed(number)
            modules.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
            stages.append(pipelining.PipelineStage(modules[-1], number, 2 * size, torch.device("cpu")))
        pipeline = getattr(pipelining, f"Schedule{schedule}")(stages, 2 * size, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.Adam([p for module in modules for p in module.parameters()], 1e-2)
        for step in range(steps):
            inputs = torch.randn(4 * size, WIDTH, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            more = {"target": inputs.sin()} if 2 * size - 1 in numbers else {}
            pipeline.step(*([inputs] if rank == 0 else []), **more)
            optimizer.step()
            context.mark("step", step)
        weights = b"".join(p.detach().numpy().tobytes() for module in modules for p in module.parameters())
        return hashlib.sha256(weights).hexdigest()

    return run


def two_by_two(context: harness.Context) -> str:
    """Two stages, each twice: DistributedDataParallel inside a pipeline, over groups of a DeviceMesh."""
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "stage"))
    stages, copies = mesh.get_group("stage"), mesh.get_group("copy")
    number, copy = dist.get_rank(stages), dist.get_rank(copies)
    torch.manual_seed(number)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    ddp = DistributedDataParallel(layers, process_group=copies)
    stage = pipelining.PipelineStage(ddp, number, 2, torch.device("cpu"), group=stages)
    pipeline = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-2)
    for step in range(10):
        inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2 * step + copy))
        optimizer.zero_grad()
        if number == 0:
            pipeline.step(inputs)
        else:
            pipeline.step(target=inputs.sin())
        optimizer.step()
        context.mark("step", step)
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())).hexdigest()


def batches(context: harness.Context) -> float:
    """batch_isend_irecv, receives from whoever comes first, objects, groups that come and go."""
    me, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((50,), float(me))
    for step in range(20):
        left, right = torch.empty(50), torch.empty(50)
        ops = [
            dist.P2POp(dist.irecv, left, (me - 1) % n),
            dist.P2POp(dist.isend, x, (me + 1) % n),
            dist.P2POp(dist.irecv, right, (me + 1) % n),
            dist.P2POp(dist.isend, 2 * x, (me - 1) % n),
        ]
        for work in reversed(dist.batch_isend_irecv(ops)):
            work.wait()
        x = 0.5 * x + 0.3 * left + 0.1 * right
        if step % 3 == 0 and me == 0:
            boxes = [torch.empty(3) for _ in range(n - 1)]
            for work in reversed([dist.irecv(box, tag=5) for box in boxes]):
                work.wait()
            x[:3] += sum(sorted(boxes, key=lambda box: float(box[0])))
        elif step % 3 == 0:
            dist.send(x[:3].clone(), 0, tag=5)
        if step % 4 == 0:
            _objects(step)
            some = dist.new_group([0, 1] if step % 8 else [1, 3])
            if dist.get_rank(some) >= 0:
                dist.all_reduce(x, dist.ReduceOp.AVG, group=some)
                dist.destroy_process_group(some)
        context.mark("step", step)
    return x.double().sum().item()


def _objects(step: int) -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    box: list[Any] = [{"step": step}]
    if me == 0:
        dist.send_object_list(box, 1)
    elif me == 1:
        dist.recv_object_list(box, 0)
    assert box == [{"step": step}]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [step * rank for rank in range(n)] if me == 2 else None, src=2)
    assert mine == [step * me]
    dist.barrier()


def come_to(job: TorchKeeper, ranks: set[int], step: int) -> None:
    """Until each of them has done this step."""
    job.run_until(lambda: all((rank, "step", step) in job.group._marks for rank in ranks))


VICTIMS = {
    "first": {0},
    "middle": {1},
    "last": {STAGES - 1},
    "neighbours": {1, 2},
    "ends": {0, STAGES - 1},
    "all": set(range(STAGES)),
}


def killed(job: TorchKeeper, victims: set[int], step: int = 4) -> list[Any]:
    """What the ranks return, and they were killed."""
    come_to(job, victims, step)
    for victim in victims:
        assert job.kill(victim)
    values = job.values()
    assert {rank for rank, _ in job.deaths} >= victims
    return values


@pytest.mark.parametrize(
    ("schedule", "who"), most([("1F1B", "neighbours"), ("GPipe", "ends")], [("1F1B", "first"), ("1F1B", "all")])
)
def test_killed_stages(keep: Keep, undisturbed: Any, schedule: str, who: str) -> None:
    assert killed(keep(training(schedule, 8)), VICTIMS[who]) == undisturbed(schedule, 8)


@pytest.mark.parametrize("who", ["first", "neighbours"])
def test_groups_of_stages(keep: Keep, undisturbed: Any, who: str) -> None:
    """Only what goes from stage 1 to 2 and back is logged; a stage's group starts again with it."""
    job = keep(training("1F1B", 8), log=[[0, 1], [2, 3]])
    assert killed(job, VICTIMS[who]) == undisturbed("1F1B", 8)


@pytest.mark.parametrize("schedule", most(["ZBVZeroBubble"], ["Interleaved1F1B"]))
def test_receives_of_two_stages_keep_their_order(keep: Keep, schedule: str) -> None:
    """The reference is gloo's: an undisturbed run of ftcomm would be wrong in the same way."""
    wanted = keep(interleaved(schedule), backend="gloo").values()
    assert killed(keep(interleaved(schedule)), {2}) == wanted


def test_everything_sent_in_pairs(keep: Keep) -> None:
    wanted = keep(batches).values()
    assert killed(keep(batches), {1}) == wanted


@pytest.mark.parametrize(("schedule", "who"), [("1F1B", "first"), ("1F1B", "neighbours"), ("GPipe", "last")])
def test_stages_on_a_gpu(keep: Keep, gpu: str, schedule: str, who: str) -> None:
    """What is logged, and what a replacement is fed with, are copies in memory of the host."""
    wanted = keep(training(schedule, 8, gpu)).values()
    assert killed(keep(training(schedule, 8, gpu)), VICTIMS[who]) == wanted


# -- the longer ones


@pytest.mark.table
@pytest.mark.parametrize("transport", ["shm", "tcp", "hosts"])
@pytest.mark.parametrize("who", VICTIMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_of_all_roles(keep: Keep, undisturbed: Any, schedule: str, who: str, transport: str) -> None:
    wanted = undisturbed(schedule, 12)
    assert killed(keep(training(schedule, 12), transport=transport), VICTIMS[who]) == wanted


@pytest.mark.table
@pytest.mark.parametrize("who", VICTIMS)
@pytest.mark.parametrize(
    "schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "two_by_two"]
)
def test_other_schedules(keep: Keep, schedule: str, who: str) -> None:
    program = two_by_two if schedule == "two_by_two" else interleaved(schedule)
    wanted = keep(program).values()
    assert killed(keep(program), VICTIMS[who]) == wanted


@pytest.mark.table
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("who", ["first", "middle", "last", "neighbours"])
def test_killed_with_a_message(keep: Keep, undisturbed: Any, point: str, who: str) -> None:
    wanted = undisturbed("1F1B", 12)
    faults = ";".join(f"rank={rank},at={point}:30,do=kill" for rank in VICTIMS[who])
    job = keep(training("1F1B", 12), faults=faults)
    assert job.values() == wanted
    assert {rank for rank, _ in job.deaths} >= VICTIMS[who]


@pytest.mark.table
@pytest.mark.parametrize("transport", ["shm", "hosts"])
def test_thirty_kills(keep: Keep, undisturbed: Any, transport: str) -> None:
    """At random moments; a replacement may be killed before it has caught up."""
    wanted = undisturbed("1F1B", 60)
    job = keep(training("1F1B", 60), transport=transport)
    rng = random.Random(30)
    for kill in range(30):
        come_to(job, {rng.randrange(STAGES)}, 2 * kill)
        pause = time.monotonic() + rng.uniform(0, 0.01)
        while time.monotonic() < pause:
            pass
        assert job.kill(rng.randrange(STAGES))
    assert job.values(120.0) == wanted
    assert job.restarts + job.generation >= 20  # a kill may hit a process that dies already
