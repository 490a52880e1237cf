"""The engine with DistributedDataParallel: kills at every phase of a step, with real processes."""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_training import (
    ALL,
    AT,
    BATCH,
    COMPLETE,
    IMAGES,
    LABELS,
    PHASES,
    STEPS,
    Net,
    Run,
    digits,
    train,
    undisturbed,
)
from kept import Kept
from tables import most
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ftcomm
import ftcomm.recovery
from ftcomm.launch import preempt
from ftcomm.recovery.checkpoint_files import CheckpointFolder
from ftcomm.torch import groups


@pytest.fixture
def wanted(world: Any) -> Run:
    return undisturbed(world)


@pytest.mark.parametrize("victim", most([2], [0]))
@pytest.mark.parametrize("phase", most(["forward", "backward-50", "before-update", "update", "end"], PHASES))
@pytest.mark.sample(2)
def test_replication_is_exact(world: Any, wanted: Run, phase: str, victim: int) -> None:
    run = Run(world, phase, victim, strategy="replication")
    assert len(run.values) == 4
    assert run.digests == wanted.digests
    assert run.only("rate") == wanted.only("rate")
    assert run.only("steps") == 2 * STEPS
    progress = run.only("progress")
    assert progress["joined"] == 1
    # "before-update": the others may have all of its gradients, or not. The first two: who dies at the begin of a step may be
    # missed, and replaced, before the others begin it.
    if phase not in ("before-update", "between", "forward"):
        assert progress["dropped"] == (phase not in COMPLETE)
    assert run.samples(0) == run.samples(1) == ALL


@pytest.mark.parametrize(
    "phase", most(["backward-50", "update"], [phase for phase in PHASES if phase != "before-update"])
)
@pytest.mark.parametrize("strategy", most(["rollback"], ["lossy"]))
def test_replicas_stay_equal(world: Any, wanted: Run, strategy: str, phase: str) -> None:
    """Whoever comes back meets the others some steps later; each sample of an epoch is used once."""
    run = Run(world, phase, replace="later", strategy=strategy)
    assert len(run.values) == 4
    assert len(run.digests) == 1
    progress = run.only("progress")
    assert progress["joined"] == 1
    before = phase not in COMPLETE
    assert progress["dropped"] == (before and strategy == "rollback")
    assert run.samples(0, lambda rank, step: rank == 2 and step == AT and before) == ALL
    assert run.samples(1) == ALL


@pytest.mark.parametrize(
    ("strategy", "keep_batch"),
    most([("lossy", True), ("rollback", False)], product(["lossy", "rollback"], [False, True])),
)
def test_nobody_comes_back(world: Any, strategy: str, keep_batch: bool) -> None:
    run = Run(world, "backward-50", replace="never", strategy=strategy, keep_batch=keep_batch, samples=205)
    assert len(run.values) == 3
    assert len(run.digests) == 1
    assert run.samples(0, lambda rank, step: rank == 2 and step == AT) == list(range(205))
    assert run.samples(1) == list(range(205))


def test_each_sample_weighs_the_same(world: Any) -> None:
    """Ragged steps: some ranks have fewer samples than others, or none. As one process that takes them all together."""
    samples = 4 * BATCH + 6

    def distributed(context: Any) -> list[float]:
        model = DistributedDataParallel(linear())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = ftcomm.recovery.Engine(model, optimizer, strategy="rollback")
        loader = DataLoader(digits(samples), batch_size=BATCH)
        for _, (images, labels, _) in engine.steps(loader, epochs=2):
            with engine.step():
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.module[1].weight.flatten().tolist())

    def linear() -> Any:
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    alone = linear()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(2):
        for part in (slice(0, 4 * BATCH), slice(4 * BATCH, samples)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(alone(IMAGES[part]), LABELS[part]).backward()
            optimizer.step()
    for weights in world(4, distributed, policy="lossy"):
        assert weights == pytest.approx(alone[1].weight.flatten().tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "faults",
    most(
        ["rank=0.0,at=join.transfer.source,do=kill", "rank=1.0,at=join.admit,do=kill"],
        ["rank=2.1,at=join.transfer.joiner,do=kill", "rank=2.1,at=join.request,do=kill"],
    ),
)
def test_a_second_death_in_the_recovery(world: Any, wanted: Run, faults: str) -> None:
    job = Kept(world, lambda context: train(context, "backward-50", strategy="replication"), faults=faults)
    values = job.values()
    assert {value["digest"] for value in values} == wanted.digests
    assert sum(job.incarnation) == 2


def test_two_die_in_one_step(world: Any, wanted: Run) -> None:
    def both(context: Any) -> Any:
        return train(
            context,
            "forward" if context.rank == 0 else "update",
            victim=0 if context.rank == 0 else 3,
            strategy="replication",
        )

    job = Kept(world, both)
    assert {value["digest"] for value in job.values()} == wanted.digests
    assert job.incarnation == [1, 0, 0, 1]


def test_nobody_comes_in_time(world: Any) -> None:
    def patient(context: Any) -> str:
        if context.rank != 2:
            with pytest.raises(ftcomm.PeerFailure) as caught:
                train(context, "forward", strategy="replication", patience=0.5)
            return str(caught.value)
        return train(context, "forward", strategy="replication")["digest"]

    group = world.start(4, patient, policy="lossy")
    texts = {text for text in world.values(group, dies=(2,)) if text}
    assert texts == {
        "No replacement came for rank 2 within 0.5 s. Start again from a checkpoint, or give replacements more time."
    }


def test_who_is_told_to_leave_while_others_wait_lets_none_time_out(world: Any) -> None:
    """It is at the all-reduce at once, and the others when their patience is over: longer than an operation may take."""

    def waiting(context: Any) -> Any:
        def hear(event: dict[str, Any]) -> None:
            if event["event"] == "awaiting" and context.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        groups.job_of(groups.backend_of()).add_listener(hear)
        with pytest.raises(SystemExit if context.rank == 1 else ftcomm.PeerFailure) as caught:
            train(context, "forward", strategy="replication", patience=7.0)
        return str(caught.value)

    values = world.values(world.start(3, waiting, policy="lossy", timeout=3.0), dies=(2,))
    assert values[0].startswith("No replacement came for rank 2 within 7 s")
    assert values[1] == "0"


def test_the_dead_of_a_launcher_that_was_told_to_end_are_not_waited_for(world: Any, tmp_path: Path) -> None:
    def told(context: Any) -> Any:
        if context.rank != 1:
            return train(context, "forward", strategy="replication", patience=20.0)["steps"]
        os.environ["FTCOMM_EVENTS"] = str(tmp_path)

        def hear(event: dict[str, Any]) -> None:
            if event["event"] == "step" and event["step"] == AT:
                preempt.leave_notice(tmp_path, 0, [1, 2])
                os.kill(os.getpid(), signal.SIGTERM)

        groups.job_of(groups.backend_of()).add_listener(hear)
        with pytest.raises(SystemExit):
            train(context, strategy="replication")
        return None

    values = world.values(world.start(4, told, policy="lossy"), dies=(2,))
    assert values[0] == values[3] > 0


@pytest.mark.parametrize("strategy", ["replication", "rollback"])
def test_replicas_that_differ_are_found(world: Any, strategy: str) -> None:
    """When the replacement has come, or when they go on without the dead one."""

    def spoiled(context: Any) -> str:
        torch.manual_seed(1)
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        engine = ftcomm.recovery.Engine(model, optimizer, strategy=strategy)
        loader = DataLoader(digits(200), batch_size=BATCH)
        with pytest.raises(ftcomm.Mismatch) as caught:
            for step, (images, labels, _) in engine.steps(loader, epochs=100):
                # A step apart: who dies at the begin of one may be missed, and replaced, before the others begin it.
                if step == 2 and context.rank == 3:
                    with torch.no_grad():
                        model.module.head[1].weight[5, 7] += 1e-6
                if step == 3 and context.rank == 2 and context.incarnation == 0:
                    context.die()
                with engine.step():
                    nn.functional.cross_entropy(model(images), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return str(caught.value)

    group = world.start(4, spoiled, policy="lossy")
    group.wait_ended(2)
    if strategy == "replication":
        world.replace(group, 2)
    texts = {text for text in world.values(group, dies=(2,)) if text}
    assert len(texts) == 1
    assert "parameter head.1.weight on rank 3 differs from rank 0's" in texts.pop()


@pytest.mark.parametrize("strategy", ["replication", "checkpoint"])
def test_all_die_and_the_next_start_goes_on(world: Any, wanted: Run, tmp_path: Path, strategy: str) -> None:
    """Also when the newest checkpoint is damaged: the one before it is used."""
    policy = "raise" if strategy == "checkpoint" else "lossy"
    how = {"strategy": strategy, "checkpoint_dir": tmp_path, "checkpoint_every": 2}

    def first(context: Any) -> None:
        train(context, "before-update", context.rank, **how)

    group = world.start(4, first, policy=policy)
    assert all(value is None for value in world.values(group, dies=(0, 1, 2, 3)))
    files = sorted(path for path in tmp_path.iterdir() if path.suffix == ".pt")
    assert [torch.load(path, weights_only=True)["state"]["engine"]["step"] for path in files] == [2, 4]
    files[-1].write_bytes(files[-1].read_bytes()[:-100])

    values = world.values(world.start(4, lambda context: train(context, **how), policy=policy))
    assert {value["digest"] for value in values} == wanted.digests
    assert {value["steps"] for value in values} == {2 * STEPS}


@pytest.mark.parametrize(("phase", "saved"), [("backward-50", AT - 1), ("update", AT + 1)])
def test_with_checkpoint_a_death_ends_all_whatever_the_policy_allows(
    world: Any, tmp_path: Path, phase: str, saved: int
) -> None:
    """In a step, or between two."""
    how = {"strategy": "checkpoint", "checkpoint_dir": tmp_path, "checkpoint_every": 2}

    def ends(context: Any) -> tuple[Any, str]:
        with pytest.raises(ftcomm.PeerFailure) as caught:
            train(context, phase, **how)
        return caught.value.ranks, str(caught.value)

    for ranks, text in world.values(world.start(3, ends, policy="lossy"), dies=(2,))[:2]:
        assert ranks == (2,)
        assert text.startswith("Rank 2 is gone, and with strategy 'checkpoint' all end. Start again: ")
    assert torch.load(max(tmp_path.glob("*.pt")), weights_only=True)["state"]["engine"]["step"] == saved


def test_without_a_folder_nobody_is_sent_to_the_newest_checkpoint(world: Any) -> None:
    def ends(context: Any) -> str:
        with pytest.raises(ftcomm.PeerFailure) as caught:
            train(context, "update", strategy="auto")
        return str(caught.value)

    for text in world.values(world.start(3, ends, policy="raise"), dies=(2,))[:2]:
        assert text.startswith(
            "Rank 2 is gone, and with strategy 'checkpoint' all end. There is no checkpoint folder: "
        )
        assert "begins with the first step" in text


def test_a_checkpoint_that_only_one_rank_can_read(world: Any, wanted: Run, tmp_path: Path) -> None:
    def part(context: Any, phase: str = "") -> Any:
        folder = tmp_path / str(context.rank)
        return train(context, phase, context.rank, strategy="replication", checkpoint_dir=folder, checkpoint_every=4)

    world.values(world.start(4, lambda context: part(context, "before-update"), policy="lossy"), dies=(0, 1, 2, 3))
    assert len(list((tmp_path / "0").glob("*.pt"))) == 1
    assert not list((tmp_path / "3").glob("*.pt"))
    assert {value["digest"] for value in world.values(world.start(4, part, policy="lossy"))} == wanted.digests


def test_checkpoints_of_different_runs_are_not_mixed(world: Any, tmp_path: Path) -> None:
    def part(context: Any) -> Any:
        folder = tmp_path / str(context.rank)
        return train(context, strategy="replication", checkpoint_dir=folder, checkpoint_every=STEPS)

    def again(context: Any) -> str:
        with pytest.raises(ftcomm.Mismatch) as caught:
            part(context)
        return str(caught.value)

    world(2, part, policy="lossy")
    with CheckpointFolder(tmp_path / "0") as kept, CheckpointFolder(tmp_path / "1") as other:
        step, state = kept.newest()
        state["model"]["head.1.weight"][5, 7] += 1e-6
        other.save(step, state, wait=True)
    texts = {*world(2, again, policy="lossy")}
    assert len(texts) == 1
    assert f"checkpoints of step {2 * STEPS} that rank 1 has read differ from rank 0's" in texts.pop()


def test_over_tcp(world: Any) -> None:
    wanted = Run(world, strategy="replication", options={"transport": "tcp"})
    run = Run(world, "backward-50", strategy="replication", options={"transport": "tcp"})
    assert run.digests == wanted.digests
