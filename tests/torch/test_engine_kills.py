"""The engine with DistributedDataParallel: kills while a checkpoint is written, with a gradient scaler, and at random moments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ddp_training import (
    ALL,
    AT,
    CHECKPOINT,
    PHASES,
    STEPS,
    Run,
    diary,
    train,
    undisturbed,
    used_samples,
)
from engine_script import Script, kept
from kept import Kept
from tables import most


@pytest.fixture
def wanted(world: Any) -> Run:
    return undisturbed(world)


@pytest.mark.parametrize("phase", CHECKPOINT)
def test_a_death_while_a_checkpoint_is_written(world: Any, wanted: Run, tmp_path: Path, phase: str) -> None:
    """Of the lowest rank, which writes it. The next one is written by its replacement."""
    how = {"strategy": "replication", "checkpoint_dir": tmp_path, "checkpoint_every": AT}
    run = Run(world, phase, 0, **how)
    assert len(run.values) == 4
    assert run.digests == wanted.digests
    assert run.only("progress")["joined"] == 1
    assert run.samples(0) == run.samples(1) == ALL
    files = sorted(path for path in tmp_path.iterdir() if path.suffix == ".pt")
    assert torch.load(files[-1], weights_only=True)["state"]["engine"]["step"] == 2 * STEPS


SCALED = ["plain", "fused", "unscaled", "skipped"]


@pytest.mark.parametrize("phase", most(["backward-50"], ["forward", "end"]))
@pytest.mark.parametrize("scaled", most(["plain"], SCALED))
def test_a_dropped_step_with_a_gradient_scaler(world: Any, scaled: str, phase: str) -> None:
    """The scale is put back, also in a fused optimizer. An update before was skipped; with "skipped" this one, too."""
    calm, run = undisturbed(world, scaled=scaled), Run(world, phase, strategy="replication", scaled=scaled)
    assert len(run.values) == 4
    assert calm.only("scale") not in (None, 1024.0)
    assert run.only("scale") == calm.only("scale")
    assert run.digests == calm.digests
    assert run.only("progress")["joined"] == 1


@pytest.mark.parametrize("strategy", ["replication", "rollback", "lossy"])
@pytest.mark.parametrize("phase", most(["backward-50", "update", "end"], PHASES))
def test_on_a_gpu(world: Any, gpu: str, strategy: str, phase: str) -> None:
    """Generators, updates and copies of the state on a device."""
    run = Run(world, phase, replace="at once" if strategy == "replication" else "later", strategy=strategy, device=gpu)
    assert len(run.values) == 4
    assert len(run.digests) == 1
    assert run.only("progress")["joined"] == 1
    if strategy == "replication":
        assert run.digests == undisturbed(world, device=gpu).digests
        assert run.samples(0) == run.samples(1) == ALL


@pytest.mark.parametrize("scaled", ["plain", "fused"])
def test_a_gradient_scaler_on_a_gpu(world: Any, gpu: str, scaled: str) -> None:
    how = {"strategy": "replication", "scaled": scaled, "device": gpu}
    calm, run = Run(world, **how), Run(world, "backward-50", **how)
    assert len(run.values) == 4
    assert run.only("scale") == calm.only("scale")
    assert run.digests == calm.digests


def test_a_checkpoint_from_a_gpu(world: Any, gpu: str, tmp_path: Path) -> None:
    how = {"strategy": "replication", "checkpoint_dir": tmp_path, "checkpoint_every": AT, "device": gpu}
    calm, run = Run(world, strategy="replication", device=gpu), Run(world, "checkpoint-before", 0, **how)
    assert len(run.values) == 4
    assert run.digests == calm.digests


@pytest.mark.parametrize("strategy", most(["replication"], ["rollback", "lossy"]))
@pytest.mark.parametrize("kills", most([5], [50]))
def test_random_kills(world: Any, wanted: Run, strategy: str, kills: int, tmp_path: Path) -> None:
    """At any moment, in starts and in recoveries as well, as long as one rank is left that has the state.

    ``replication`` waits for replacements. With the others the run goes on until the last one is there, however long it takes.
    """
    rng = random.Random(f"{strategy}{kills}")
    exact, enough = strategy == "replication", tmp_path / "enough"
    more: dict[str, Any] = {} if exact else {"enough": enough}
    job = Kept(
        world,
        lambda context: train(context, epochs=4 * kills if exact else 10000, strategy=strategy, **more),
    )
    killed, whole = 0, {*()}
    while not (killed == kills and (exact or len(whole) == 4)) and job.step():
        trains = {(r, i) for r, name, i in job.group._marks if name == "trains"}
        whole = {r for r in range(4) if (r, job.incarnation[r]) in trains}
        victim = rng.randrange(4)
        if killed < kills and whole - {victim} and rng.random() < (0.03 if len(whole) == 4 else 0.01):
            job.group.kill(victim, incarnation=job.incarnation[victim])
            killed += 1
            job.group.wait_ended(victim, job.incarnation[victim])
            whole -= {victim}
    enough.touch()
    values = job.values()
    assert killed == kills == sum(job.incarnation)
    assert len({value["digest"] for value in values}) == 1
    joined = {value["progress"]["joined"] for value in values}
    assert len(joined) == 1
    assert joined.pop() <= kills  # who is killed before it comes in has not
    if exact:
        assert {value["steps"] for value in values} == {4 * kills * STEPS}
    used = used_samples(job.group._marks)
    last = max(used)
    for epoch in range(last):
        assert used[epoch] == ALL, f"epoch {epoch}: {diary(job.group._marks, epoch)}"
    assert used[last] == ALL if exact else len(used[last]) == len(set(used[last]))


@pytest.mark.parametrize("strategy", ["replication", "rollback"])
def test_a_checkpoint_is_written_by_another_one_if_its_writer_dies(world: Any, tmp_path: Path, strategy: str) -> None:
    class Writing(Script):
        engine: ClassVar[dict[str, Any]] = {"checkpoint_dir": tmp_path, "checkpoint_every": 3, "keep": 9}

        def end(self, step: int) -> None:
            if step == 2 and self.first(0):
                self.context.die()

    Writing.strategy = strategy
    if strategy == "replication":
        assert kept(world, Writing)[1] == [1, 0, 0]
    else:
        world(3, lambda context: Writing(context).run(), dies=(0,), policy="lossy")
    assert "step-000000003" in {path.name[:14] for path in tmp_path.glob("*.pt")}
