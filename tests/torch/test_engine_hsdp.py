"""The engine with FSDP2 over replicas (HSDP): two replicas of two shards each, kills at every phase of a step."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import signal
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept import Kept
from tables import most
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ftcomm
import ftcomm.recovery
from ftcomm.launch import preempt
from ftcomm.recovery.engine import gathered
from ftcomm.recovery.engine.restorable import reseed
from ftcomm.torch import groups

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason=f"torch {torch.__version__} has no FSDPModule.reset_iter_state()",
)

STEPS = 6  # of an epoch
AT = 3  # the step in which the victim dies
BATCH = 4
SAMPLES = 4 * BATCH * STEPS
X = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(X, X[:, :3].argmax(1), torch.arange(SAMPLES))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


def build(sharded: bool = True, shape: tuple[int, ...] = (2, 2), device: str = "cpu") -> Any:
    """Some parameters have odd sizes, so that the ranks' shards differ in size; one rank has none of the last bias."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 15), Block(15), Block(15), Block(15), nn.Linear(15, 3)).to(device)
    if sharded:
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        for block in net[1:4]:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def loader() -> Any:
    return DataLoader(DATA, batch_size=BATCH, shuffle=True)


class Kill:
    """Where this rank dies, if it is one of the victims."""

    def __init__(self, context: Any, phase: str, victims: tuple[int, ...], net: Any) -> None:
        self.context, self.phase, self.net = context, phase, net
        self.armed = context.rank in victims and context.incarnation == 0

    def at(self, step: int, phase: str) -> None:
        if not (self.armed and step == AT and phase == self.phase):
            return
        if phase == "forward":
            self.net[2].register_forward_pre_hook(lambda *_: self.context.die())
        elif phase == "backward":
            self.net[2].register_full_backward_hook(lambda *_: self.context.die())
        elif phase == "update":
            self.in_update()
        else:
            self.context.die()

    def in_update(self) -> None:
        from torch.optim import adam

        whole = adam._single_tensor_adam

        def half(*lists: Any, **more: Any) -> None:
            middle = len(lists[0]) // 2
            whole(*[part[:middle] if isinstance(part, list) else part for part in lists], **more)
            self.context.die()

        adam._single_tensor_adam = half


def full(net: Any, optimizer: Any) -> Any:
    """All weights and moments, whole. Collective."""
    tensors = [*net.state_dict().values()]
    tensors += [value for values in optimizer.state_dict()["state"].values() for value in values.values()]
    return [(value.full_tensor() if hasattr(value, "full_tensor") else value).tolist() for value in tensors]


def train(
    context: Any,
    phase: str = "",
    victims: tuple[int, ...] = (),
    epochs: int = 2,
    shape: Any = (2, 2),
    device: str = "cpu",
    **more: Any,
) -> Any:
    if device != "cpu":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    net = build(shape=shape, device=device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, foreach=False)
    engine = ftcomm.recovery.Engine(net, optimizer, **{"strategy": "replication", **more})
    kill = Kill(context, phase, victims, net)
    begun = False
    for step, (x, y, numbers) in engine.steps(loader(), epochs=epochs):
        if not begun:
            begun = True
            context.mark("trains", context.incarnation)
        context.mark("batch", (step, engine.epoch, numbers.tolist()))
        kill.at(step, "between")
        if step == AT and engine._folder is not None:
            engine._folder.wait()
        with engine.step():
            kill.at(step, "forward")
            kill.at(step, "backward")
            nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            kill.at(step, "before-update")
            kill.at(step, "update")
            optimizer.step()
            optimizer.zero_grad()
            kill.at(step, "end")
    return {"full": full(net, optimizer), "progress": engine.progress.state_dict(), "steps": engine.step_number}


def ended(world: Any, fn: Any, faults: str = "", restarts: bool = True) -> tuple[list[Any], Any]:
    """Values of a job whose dead are replaced, and the job."""
    job = Kept(world, fn, faults=faults)
    return job.values(), job


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


@pytest.fixture
def wanted(world: Any, known: dict[str, Any]) -> Any:
    """Of an undisturbed run."""
    if "full" not in known:
        values, job = ended(world, train)
        assert all(value == values[0] for value in values)
        known.update(full=values[0]["full"], marks=job.group._marks)
    return known["full"]


def samples(marks: Any, epoch: int) -> list[int]:
    """Of the epoch. A step that is done again has the same batch."""
    taken = {(rank, value[0]): value[2] for rank, name, value in marks if name == "batch" and value[1] == epoch}
    return sorted(number for numbers in taken.values() for number in numbers)


def test_as_without_the_engine(world: Any, wanted: Any, known: dict[str, Any]) -> None:
    batches = {(rank, value[0]): value[2] for rank, name, value in known["marks"] if name == "batch"}

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
    assert samples(known["marks"], 0) == samples(known["marks"], 1) == list(range(SAMPLES))


PHASES = ["between", "forward", "backward", "before-update", "update", "end"]


@pytest.mark.parametrize(("phase", "victim"), most([("forward", 2), ("update", 3)], product(PHASES, range(4))))
def test_a_kill_is_not_seen_in_the_result(world: Any, wanted: Any, phase: str, victim: int) -> None:
    values, job = ended(world, lambda context: train(context, phase, (victim,)))
    assert [value["full"] == wanted for value in values] == [True] * 4
    assert {value["steps"] for value in values} == {2 * STEPS}
    dropped = [0] if phase in ("update", "end") else [0, 1] if phase == "between" else [1]
    assert values[0]["progress"] in [{"step": 2 * STEPS, "dropped": n, "joined": 1, "lossy": 0} for n in dropped]
    assert samples(job.group._marks, 0) == samples(job.group._marks, 1) == list(range(SAMPLES))


@pytest.mark.parametrize(("phase", "victim"), [("backward", 1), ("update", 3)])
def test_shards_on_a_gpu(world: Any, gpu: str, known: dict[str, Any], phase: str, victim: int) -> None:
    if gpu not in known:
        known[gpu] = ended(world, lambda context: train(context, device=gpu))[0][0]["full"]
    values, _ = ended(world, lambda context: train(context, phase, (victim,), device=gpu))
    assert [value["full"] == known[gpu] for value in values] == [True] * 4


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


def test_checkpoints_are_of_whole_tensors(world: Any, wanted: Any, tmp_path: Path) -> None:
    """Plain torch reads them, for a model without shards."""
    how = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}
    values, _ = ended(world, lambda context: train(context, **how))
    assert [value["full"] == wanted for value in values] == [True] * 4
    saved = torch.load(max(tmp_path.glob("*.pt")), weights_only=True)
    net = build(sharded=False)
    optimizer = torch.optim.Adam(net.parameters())
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert full(net, optimizer) == wanted


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


def test_replicas_that_differ_are_found(world: Any) -> None:
    def spoiled(context: Any) -> str:
        net = build()
        optimizer = torch.optim.Adam(net.parameters())
        engine = ftcomm.recovery.Engine(net, optimizer, "replication")
        with pytest.raises(ftcomm.Mismatch) as caught:
            for step, (x, y, _) in engine.steps(loader(), epochs=100):
                # A step apart: who dies at the begin of one may be missed, and replaced, before the others begin it.
                if step == 2 and context.rank == 3:
                    net[2].linear.weight.to_local().data[2, 7] += 1e-6
                if step == 3 and context.rank == 0 and context.incarnation == 0:
                    context.die()
                with engine.step():
                    nn.functional.cross_entropy(net(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return str(caught.value)

    values, _ = ended(world, spoiled)
    assert len(values) == 4
    assert all("parameter 2.linear.weight on rank 3 differs from rank 1's" in value for value in values)


@pytest.mark.table
def test_without_replicas(world: Any, tmp_path: Path) -> None:
    """Checkpoint and restart, and nothing else."""

    def alone(context: Any, phase: str = "") -> Any:
        how = {"strategy": "auto", "checkpoint_dir": tmp_path, "checkpoint_every": 2}
        with pytest.raises(ftcomm.ConfigError, match="only copy of its shards"):
            train(context, shape=(2,), strategy="replication")
        with pytest.raises(ftcomm.ConfigError, match="the model is sharded"):
            train(context, shape=(2,), strategy="lossy")
        if phase and context.rank == 0:
            with pytest.raises(ftcomm.PeerFailure, match="Start again"):
                train(context, phase, (1,), shape=(2,), **how)
            return None
        return train(context, phase, (1,), shape=(2,), **how)

    assert (
        world.values(world.start(2, lambda context: alone(context, "backward"), policy="lossy"), dies=(1,))
        == [None] * 2
    )
    assert [path.name[:14] for path in tmp_path.glob("*.pt")] == ["step-000000002"]
    again = world(2, alone, policy="lossy")
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    assert again == world(2, alone, policy="lossy")


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


def test_each_sample_weighs_the_same(world: Any) -> None:
    """Ragged steps: some ranks have fewer samples than others, or none. As one process that takes them all together."""
    few = 4 * BATCH + 6

    def linear(sharded: bool) -> Any:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(12, 3))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if sharded else None
        return fully_shard(net, mesh=mesh) if sharded else net

    def distributed(context: Any) -> Any:
        net = linear(True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        engine = ftcomm.recovery.Engine(net, optimizer, strategy="replication")
        data = TensorDataset(*[tensor[:few] for tensor in DATA.tensors])
        for _, (x, y, _) in engine.steps(DataLoader(data, batch_size=BATCH), epochs=2):
            with engine.step():
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return net[0].weight.full_tensor().flatten().tolist()

    alone = linear(False)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(2):
        for part in (slice(0, 4 * BATCH), slice(4 * BATCH, few)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(DATA.tensors[0][part]), DATA.tensors[1][part]).backward()
            optimizer.step()
    for weights in world(4, distributed, policy="lossy"):
        assert weights == pytest.approx(alone[0].weight.flatten().tolist(), abs=1e-6)


def test_what_a_script_may_do(world: Any) -> None:
    """Accumulate, prefetch, gather in the forward pass and after the backward pass, and evaluate between steps."""

    def script(context: Any, dies: bool) -> Any:
        net = build()
        blocks = list(net[1:4])
        for block, ahead in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([ahead])
            ahead.set_modules_to_backward_prefetch([block])
        for part in (net, *blocks):
            part._set_unshard_async_op(True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        engine = ftcomm.recovery.Engine(net, optimizer, "replication")
        mesh = net[0].weight.device_mesh
        seen = [torch.zeros(1) for _ in range(4)]
        failed = 0

        def in_forward(*_: Any) -> None:
            if engine.step_number == 3 and not engine.committed:
                fault(3, rank=2)
                dist.all_gather(seen, torch.ones(1))

        net[2].register_forward_pre_hook(in_forward)

        def fault(step: int, rank: int) -> None:
            if dies and context.incarnation == 0 and context.rank == rank and engine.step_number == step:
                context.die()

        for step, (x, y, _) in engine.steps(loader()):
            with engine.step():
                net.set_requires_gradient_sync(False)
                nn.functional.cross_entropy(net(x), y).backward()
                fault(1, rank=1)
                net.set_requires_gradient_sync(True)
                nn.functional.cross_entropy(net(x), y).backward()
                if step == 4:  # the others do not take part, and come to the update
                    fault(4, rank=0)
                    dist.all_gather(seen[:2], torch.ones(1), group=mesh.get_group("shard"))
                optimizer.step()
                optimizer.zero_grad()
            if not engine.committed:
                continue
            try:
                fault(5, rank=3)
                with torch.no_grad():
                    net.eval()(x)
            except ftcomm.PeerFailure:
                failed += 1
            net.train()
        return full(net, optimizer), engine.progress.dropped, failed

    quiet, _ = ended(world, lambda context: script(context, False))
    values, _ = ended(world, lambda context: script(context, True))
    assert [value[0] == quiet[0][0] for value in values] == [True] * 4
    assert [value[1] for value in values] == [3] * 4
    assert [value[2] for value in values] == [0, 0, 1, 0]


def test_a_step_that_is_not_whole_is_done_again(world: Any, wanted: Any) -> None:
    """On one rank only: a part was missing in step 2, and the membership changed during step 4."""
    from ftcomm.recovery.engine import sharded

    def spoiled(context: Any) -> Any:
        asked, begun = sharded.outcome, sharded.ShardedGradients.begin
        steps = iter(range(100))
        now = [0]

        def begin(self: Any, weight: float) -> None:
            begun(self, weight)
            now[0] = next(steps)
            self._epoch -= context.rank == 1 and now[0] == 4

        def outcome(work: Any) -> Any:
            if context.rank == 2 and now[0] == 2:
                return SimpleNamespace(contributors=(0,))
            return asked(work)

        sharded.outcome, sharded.ShardedGradients.begin = outcome, begin
        return train(context)

    for value in world(4, spoiled, policy="lossy"):
        assert value["progress"] == {"step": 2 * STEPS, "dropped": 2, "joined": 0, "lossy": 0}
        assert value["full"] == wanted


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


def test_who_leaves_takes_its_shards_along(world: Any) -> None:
    def leaving(context: Any) -> Any:
        context.die = lambda: os.kill(os.getpid(), signal.SIGTERM)
        if context.rank == 1:
            with pytest.raises(SystemExit):
                train(context, "forward", (1,))
            return None
        with pytest.raises(ftcomm.PeerFailure) as caught:
            train(context, "forward", (1,))
        return str(caught.value)

    texts = {text for text in world(4, leaving, policy="lossy") if text}
    assert len(texts) == 1
    assert "Rank 1 has left the job, and a sharded model can't be trained without its shards" in texts.pop()


def test_no_checkpoint_of_shards_that_nobody_has(world: Any, tmp_path: Path) -> None:
    """Twins are dead, the others wait for them, and all are told to leave: the newest checkpoint stays as it is."""

    def waiting(context: Any) -> Any:
        how = {"checkpoint_dir": tmp_path / "checkpoints", "checkpoint_every": 1}
        if context.rank in (1, 3):
            return train(context, "between", (1, 3), **how)
        os.environ["FTCOMM_EVENTS"] = str(tmp_path)

        def hear(event: dict[str, Any]) -> None:
            if event["event"] == "awaiting" and event["missing"] == [1, 3]:
                context.mark("awaits")

        groups.job_of(groups.backend_of()).add_listener(hear)
        with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
            train(context, **how)
        return said.getvalue()

    preempt.leave_notice(tmp_path, 0, range(4))
    group = world.start(4, waiting, policy="lossy")
    group.wait_for(0, "awaits")
    group.wait_for(2, "awaits")
    before = sorted((tmp_path / "checkpoints").glob("*.pt"))
    for rank in (0, 2):
        group.kill(rank, signal.SIGTERM)
    values = world.values(group, dies=(1, 3))
    assert f"SIGTERM: all leave before step {AT}; its state is lost, and the newest checkpoint stays" in values[0]
    assert "Nobody who is there has the shards of rank 1, 3" in values[0]
    assert "SIGTERM" not in values[2]
    assert before[-1].name.startswith(f"step-{AT:09d}")
    assert sorted((tmp_path / "checkpoints").glob("*.pt")) == before
