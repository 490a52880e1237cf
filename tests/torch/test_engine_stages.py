"""The engine with a pipeline whose messages are in no log: a death ends all, and the next start has an undisturbed run's bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import digest
from tables import most
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ftcomm
import ftcomm.recovery
from ftcomm.launch import preempt
from ftcomm.torch import groups

WIDTH, BATCH, EPOCHS, EVERY = 16, 8, 2, 3
SAMPLES = 12 * BATCH
AT = 7  # the step in which somebody dies; the newest checkpoint is then that of step 6
INPUTS = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))
AGAIN = "can't go on without its stage. Start again: the run goes on from the newest checkpoint that all stages have."


def training(folder: Path | None, copies: int = 1, die: str = "", notice: int = -1, **more: Any) -> Any:
    """Of four ranks: a digest of each, its steps, and the samples that it has seen. ``die``: where rank 2 does. ``notice``: who
    gets SIGTERM in the step AT."""

    def run(context: Any) -> Any:
        stages = 4 // copies
        torch.manual_seed(context.rank % stages)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        model, group = layers, None
        if copies > 1:
            mesh = init_device_mesh("cpu", (copies, stages), mesh_dim_names=("copy", "stage"))
            model, group = (
                DistributedDataParallel(layers, process_group=mesh.get_group("copy")),
                mesh.get_group("stage"),
            )
        stage = pipelining.PipelineStage(model, context.rank % stages, stages, torch.device("cpu"), group=group)
        schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        settings = {"checkpoint_dir": folder, "checkpoint_every": EVERY, "schedule": schedule, **more}
        engine = ftcomm.recovery.Engine(model, optimizer, scheduler=rates, **settings)
        assert engine.strategy.name == "checkpoint"
        loader = DataLoader(TensorDataset(INPUTS, torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
        seen: dict[int, list[int]] = {}
        now = {"step": -1}

        def at(phase: str) -> None:
            if die == phase and context.rank == 2 and now["step"] == AT:
                context.die()

        layers.register_forward_hook(lambda *_: at("forward"))
        layers.register_full_backward_pre_hook(lambda *_: at("backward"))
        optimizer.register_step_post_hook(lambda *_: at("update"))
        if die == "checkpoint":
            place = os.replace

            def dying(*names: Any, **how: Any) -> None:  # the others have theirs of that step
                if context.rank == 2 and now["step"] == 2 * EVERY - 1:
                    context.die()
                place(*names, **how)

            os.replace = dying
        for step, (inputs, numbers) in engine.steps(loader, epochs=EPOCHS):
            now["step"], seen[step] = step, numbers.tolist()
            if step == AT and notice == context.rank:
                os.kill(os.getpid(), signal.SIGTERM)
            with engine.step():
                if context.rank % stages == 0:
                    schedule.step(inputs)
                elif context.rank % stages == stages - 1:
                    schedule.step(target=inputs.sin())
                else:
                    schedule.step()
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
        return digest(layers, optimizer), engine.step_number, seen

    return run


def failing(program: Any) -> Any:
    """What the ranks say that are left, and who is gone in their view."""

    def run(context: Any) -> Any:
        with pytest.raises(ftcomm.PeerFailure) as caught:
            program(context)
        return str(caught.value), caught.value.ranks

    return run


@pytest.fixture(scope="module")
def known() -> dict[int, Any]:
    return {}


@pytest.fixture
def undisturbed(world: Any, known: dict[int, Any]) -> Any:
    """By the number of copies."""

    def of(copies: int) -> Any:
        if copies not in known:
            known[copies] = world(4, training(None, copies))
        return known[copies]

    return of


@pytest.mark.parametrize("policy", most(["raise"], ["lossy"]))
@pytest.mark.parametrize("phase", most(["backward", "checkpoint"], ["forward", "update"]))
def test_the_next_start_goes_on(world: Any, undisturbed: Any, tmp_path: Path, phase: str, policy: str) -> None:
    fails(world, training(tmp_path, die=phase), policy)
    goes_on(world, undisturbed(1), tmp_path, EVERY if phase == "checkpoint" else 2 * EVERY)


@pytest.mark.parametrize("policy", ["lossy", *most([], ["raise"])])
def test_replicated_stages(world: Any, undisturbed: Any, tmp_path: Path, policy: str) -> None:
    """Under ``lossy`` the replica that is left averages alone, and no step comes after that one."""
    fails(world, training(tmp_path, 2, die="backward"), policy)
    goes_on(world, undisturbed(2), tmp_path, 2 * EVERY, copies=2)


def test_a_notice_to_one_is_one_to_all(world: Any, undisturbed: Any, tmp_path: Path) -> None:
    def leaves(context: Any) -> int:
        with pytest.raises(SystemExit) as ended:
            training(tmp_path, notice=1)(context)
        return ended.value.code

    assert world(4, leaves) == [0] * 4
    goes_on(world, undisturbed(1), tmp_path, AT + 1)


def fails(world: Any, program: Any, policy: str) -> None:
    said = world.values(world.start(4, failing(program), policy=policy), dies=(2,))
    for text, gone in (said[rank] for rank in (0, 1, 3)):
        assert AGAIN in text
        assert 2 in gone


def goes_on(world: Any, wanted: Any, folder: Path, begin: int, copies: int = 1) -> None:
    found = world(4, training(folder, copies))
    assert [values[:2] for values in found] == [values[:2] for values in wanted]
    for (_, _, seen), (_, _, all_seen) in zip(found, wanted, strict=True):
        # In the first step each process tells its shapes around; then it goes on where the checkpoint is.
        assert seen == {step: numbers for step, numbers in all_seen.items() if step == 0 or step >= begin}


def test_a_notice_before_the_first_step_is_over(world: Any, tmp_path: Path) -> None:
    """There is nothing to write yet, and in a later start it is not known yet from where it goes on."""

    def told(context: Any) -> int:
        preempt.request()
        with pytest.raises(SystemExit) as ended:
            training(tmp_path)(context)
        return ended.value.code

    assert world(4, told) == [0] * 4
    assert sorted(path.name[:14] for path in tmp_path.glob("stage-*/*")) == ["step-000000001"] * 4


def test_refusals(world: Any) -> None:
    def refused(context: Any) -> list[str]:
        found = []
        for how in ({"schedule": None}, {"strategy": "replication"}, {"strategy": "checkpoint"}):
            with pytest.raises(ftcomm.ConfigError) as caught:
                training(None, **how)(context)
            found.append(str(caught.value))
        return found

    for plain, other, nowhere in world(4, refused, policy="lossy"):
        assert "Wrap the model; for the stages of a pipeline give Engine its schedule=" in plain
        assert "the ranks hold the stages of a pipeline" in other
        assert "checkpoint_dir" in nowhere


def test_a_replacement_is_refused(world: Any) -> None:
    def refused(context: Any) -> str:
        groups.job_of(groups.backend_of()).joining = True
        with pytest.raises(ftcomm.ConfigError) as caught:
            training(None)(context)
        return str(caught.value)

    assert all("nobody has what its stage had" in text for text in world(4, refused, policy="lossy"))


def wrapped(form: str) -> tuple[Any, Any]:
    """A DistributedDataParallel, and what the engine is given of it."""
    replicas = DistributedDataParallel(nn.Linear(WIDTH, 1))
    if form == "list":
        return replicas, nn.ModuleList([replicas])
    return replicas, torch.compile(replicas, backend="eager") if form == "compiled" else replicas


@pytest.mark.parametrize("form", ["plain", "list", "compiled"])
def test_replicas_draw_different_samples_however_they_are_given(world: Any, tmp_path: Path, form: str) -> None:
    """Under replay: inside of another module, or compiled, they are replicas still."""

    def seen(context: Any) -> list[int]:
        replicas, model = wrapped(form)
        optimizer = torch.optim.SGD(replicas.parameters(), 0.01)
        engine = ftcomm.recovery.Engine(model, optimizer, checkpoint_dir=tmp_path, checkpoint_every=2)
        assert engine.strategy.name == "replay"
        found = []
        for _, (x, numbers) in engine.steps(DataLoader(TensorDataset(INPUTS[:16], torch.arange(16)), batch_size=2)):
            found += numbers.tolist()
            with engine.step():
                replicas(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert engine.step_number == 4
        return found

    ours, theirs = world(2, seen, policy="replay")
    assert sorted(ours + theirs) == [*range(16)]


def test_a_rank_whose_modules_have_different_replicas_is_refused(world: Any) -> None:
    def refused(context: Any) -> str:
        halves = [torch.distributed.new_group(ranks) for ranks in ([0], [1])]
        both = [
            DistributedDataParallel(nn.Linear(2, 2)),
            DistributedDataParallel(nn.Linear(2, 2), process_group=halves[context.rank]),
        ]
        model = nn.ModuleList(both)
        with pytest.raises(ftcomm.ConfigError) as caught:
            ftcomm.recovery.Engine(model, torch.optim.SGD(model.parameters(), 0.1))
        return str(caught.value)

    texts = world(2, refused, policy="replay")
    assert texts[0].startswith("The model has DistributedDataParallel over ranks [0, 1] and [0]: ")
    assert texts[1].startswith("The model has DistributedDataParallel over ranks [0, 1] and [1]: ")


@pytest.mark.parametrize("over", [1, 2])
def test_with_a_scaler_a_checkpoint_needs_an_update_or_a_skipped_one(world: Any, tmp_path: Path, over: int) -> None:
    """``over``: steps of an update. With one, what comes before the checkpoint is no number, and the update is skipped."""

    def run(context: Any) -> str:
        model = DistributedDataParallel(nn.Linear(WIDTH, 1))
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
        engine = ftcomm.recovery.Engine(model, optimizer, scaler=scaler, checkpoint_dir=tmp_path, checkpoint_every=3)
        try:
            for step, (x,) in engine.steps(DataLoader(TensorDataset(INPUTS[:24]), batch_size=2)):
                with engine.step():
                    loss = model(x).square().mean() * (float("inf") if step == 2 and over == 1 else 1.0)
                    scaler.scale(loss).backward()
                    if (step + 1) % over == 0:
                        scaler.step(optimizer)
                        scaler.update()
                        optimizer.zero_grad()
        except ftcomm.ConfigError as error:
            return str(error)
        return ""

    for text in world(2, run, policy="replay"):
        assert text.startswith("Step 3 is followed by a checkpoint, and has made no update" if over == 2 else "")
        assert bool(text) == (over == 2)
