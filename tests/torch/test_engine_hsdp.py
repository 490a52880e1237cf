"""The engine with FSDP2 over replicas (HSDP): checkpoints of shards, ranks that leave or differ, and what a script may do."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hsdp_training import AT, BATCH, DATA, STEPS, build, ended, full, loader, needs_reset, train, undisturbed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ftcomm
import ftcomm.recovery
from ftcomm.launch import preempt
from ftcomm.torch import groups

pytestmark = needs_reset


@pytest.fixture
def wanted(world: Any) -> Any:
    return undisturbed(world)["full"]


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


def test_without_replicas_or_a_folder_all_is_lost(world: Any) -> None:
    """And nobody is sent to a checkpoint that there is not."""

    def run(context: Any) -> Any:
        if context.rank == 0:
            with pytest.raises(ftcomm.PeerFailure) as caught:
                train(context, "backward", (1,), shape=(2,), strategy="auto")
            return str(caught.value)
        return train(context, "backward", (1,), shape=(2,), strategy="auto")

    text = world.values(world.start(2, run, policy="lossy"), dies=(1,))[0]
    assert text.startswith("Rank 1 died, and with it shards that the others need. There is no checkpoint folder: ")
    assert "begins with the first step" in text


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
