"""The engine with the stages of a pipeline: whichever is killed, losses, weights and samples are those of an undisturbed run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch_store as torch_store_process

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from kept import digest  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import adam  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch_keeper import Keep, TorchKeeper, kept  # noqa: E402

import ftcomm  # noqa: E402
import ftcomm.recovery  # noqa: E402
from ftcomm.recovery.checkpoint_files import CheckpointFolder  # noqa: E402
from ftcomm.recovery.data.seeded import mixed  # noqa: E402
from ftcomm.recovery.engine.restorable import reseed  # noqa: E402

STAGES, WIDTH, BATCH, EPOCHS, EVERY = 4, 16, 8, 2, 3
SAMPLES = 6 * BATCH
LONG = 150  # epochs
STEPS = EPOCHS * SAMPLES // BATCH
AT = 7  # the step in which somebody dies; the newest checkpoint is then that of step 6
INPUTS = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


@pytest.fixture
def keep(ranks: harness.Ranks, torch_store: tuple[str, int]) -> Iterator[Keep]:
    yield from kept(ranks, torch_store, STAGES)


def layers_of(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))


def schedule_of(layers: nn.Module) -> Any:
    stage = pipelining.PipelineStage(layers, dist.get_rank(), STAGES, torch.device("cpu"))
    return pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)


def run_schedule(schedule: Any, inputs: Any) -> list[float]:
    losses: list[Any] = []
    if dist.get_rank() == 0:
        schedule.step(inputs)
    elif dist.get_rank() == STAGES - 1:
        schedule.step(target=inputs.sin(), losses=losses)
    else:
        schedule.step()
    return [loss.item() for loss in losses]


class Kill:
    """The victims' processes of incarnation n die where the nth of the phases is."""

    def __init__(
        self, context: harness.Context, victims: tuple[int, ...], phases: tuple[str, ...], layers: Any
    ) -> None:
        mine = phases[context.incarnation] if context.incarnation < len(phases) else ""
        self._phase = mine if context.rank in victims else ""
        self._die, self._step = context.die, -1
        layers.register_forward_hook(lambda *_: self.at("forward"))
        layers.register_full_backward_pre_hook(lambda *_: self.at("backward"))

    def begin(self, step: int) -> None:
        self._step = step
        self.at("between")
        if self._phase == "update" and step == AT:
            whole = adam._single_tensor_adam

            def half(*lists: Any, **more: Any) -> None:
                whole(*[part[: len(lists[0]) // 2] if isinstance(part, list) else part for part in lists], **more)
                self._die()

            adam._single_tensor_adam = half
        if self._phase == "checkpoint" and step == 8:  # its checkpoint is that of step 9
            os.replace = lambda *_: self._die()
            os.rename = os.replace
            os.link = os.replace

    def at(self, phase: str) -> None:
        if self._phase == phase and self._step == AT:
            self._die()


def training(
    folder: Path | None,
    victims: tuple[int, ...] = (),
    phases: tuple[str, ...] = (),
    until: int = 0,
    epochs: int = EPOCHS,
    update_every: int = 1,
    unwritten: tuple[int, ...] = (-1,),
    **more: Any,
) -> Callable[[harness.Context], Any]:
    """Losses, digest, steps. ``until``: all die when that step begins. ``unwritten``: a rank, and its checkpoints that fail."""

    def run(context: harness.Context) -> Any:
        layers = layers_of(context.rank)
        schedule = schedule_of(layers)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2, foreach=False)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        settings = {"checkpoint_dir": folder, "checkpoint_every": EVERY, **more}
        engine = ftcomm.recovery.Engine(layers, optimizer, scheduler=rates, **settings)
        kill = Kill(context, victims, phases, layers)
        if context.rank == unwritten[0]:
            fail_to_save(unwritten[1:])
            warnings.showwarning = lambda text, *_, **__: context.mark("warning", str(text))
        context.mark("running")
        context.mark("chose", (engine.strategy.name, engine.reason))
        losses: dict[int, list[float]] = {}
        loader = DataLoader(TensorDataset(INPUTS, torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
        for step, (inputs, numbers) in engine.steps(loader, epochs=epochs):
            context.mark("step", (step, engine.epoch, tuple(numbers.tolist())))
            if until and step == until:
                context.hold()
            kill.begin(step)
            with engine.step():
                losses[step] = run_schedule(schedule, inputs)
                assert torch.are_deterministic_algorithms_enabled()
                if (step + 1) % update_every == 0:
                    optimizer.step()
                    rates.step()
                    optimizer.zero_grad()
        assert not torch.are_deterministic_algorithms_enabled(), "as it was before the loop"
        return losses, digest(layers, optimizer), engine.step_number

    return run


def fail_to_save(unwritten: tuple[int, ...]) -> None:
    save = CheckpointFolder.save

    def saved(folder: CheckpointFolder, step: int, *more: Any, **how: Any) -> None:
        if step in unwritten:
            raise ftcomm.SystemFailure("the disk is full")
        save(folder, step, *more, **how)

    CheckpointFolder.save = saved  # type: ignore[method-assign]


def plain(context: harness.Context) -> Any:
    """What the engine's user would write by hand."""
    layers = layers_of(context.rank)
    schedule = schedule_of(layers)
    optimizer = torch.optim.Adam(layers.parameters(), 1e-2, foreach=False)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    losses: dict[int, list[float]] = {}
    torch.use_deterministic_algorithms(True)
    for step in range(STEPS):
        epoch, at = divmod(step, SAMPLES // BATCH)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mixed(0, epoch)))
        inputs = INPUTS[order[at * BATCH : (at + 1) * BATCH]]
        reseed(0, step, context.rank)
        losses[step] = run_schedule(schedule, inputs)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return losses, digest(layers, optimizer), STEPS


_known: list[Any] = []


@pytest.fixture
def wanted(keep: Keep) -> list[Any]:
    if not _known:
        _known.extend(keep(plain).values())
    return _known


def same(values: list[Any], wanted: list[Any]) -> None:
    assert [value[1:] for value in values] == [value[1:] for value in wanted]
    for value, other in zip(values, wanted, strict=True):  # those of the last process: not of what it did not do again
        assert value[0] == {step: other[0][step] for step in value[0]}


def each_sample_once(job: TorchKeeper, epochs: int = EPOCHS) -> None:
    """All stages had the same batch in each step, however often, and each sample was in one step of each epoch."""
    batches: dict[int, Any] = {}
    for _, name, value in job.group._marks:
        if name == "step":
            assert batches.setdefault(value[0], value[1:]) == value[1:]
    assert sorted(batches) == list(range(epochs * SAMPLES // BATCH))
    for epoch in range(epochs):
        assert sorted(n for at, ns in batches.values() if at == epoch for n in ns) == list(range(SAMPLES))


def steps_of(job: TorchKeeper, rank: int) -> list[int]:
    """In the order in which the rank's processes began them."""
    return [value[0] for value in job.marks(rank, "step")]


def test_undisturbed(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    job = keep(training(tmp_path))
    same(job.values(), wanted)
    each_sample_once(job)
    for rank in range(STAGES):
        name, reason = next(mark[2] for mark in job.group._marks if mark[:2] == (rank, "chose"))
        assert name == "replay"
        assert "newest checkpoint" in reason
        files = list((tmp_path / f"stage-{rank}").iterdir())
        assert len(files) == 3
        assert {*torch.load(files[0], weights_only=True)} >= {"model", "optimizer", "state"}


TABLE = pytest.mark.table
KILLS = [
    pytest.param((1,), ("forward",), id="middle-forward"),
    pytest.param((3,), ("backward",), id="last-backward"),
    pytest.param((0,), ("update",), id="first-update"),
    pytest.param((2,), ("checkpoint",), id="middle-checkpoint"),
    pytest.param((1, 2), ("between",), id="neighbours"),
    pytest.param((2,), ("forward", "backward"), id="twice"),
    *(
        pytest.param((victim,), (phase,), marks=TABLE, id=f"{victim}-{phase}")
        for victim in range(STAGES)
        for phase in ("between", "forward", "backward", "update", "checkpoint")
    ),
]


@pytest.mark.parametrize(("victims", "phases"), KILLS)
@pytest.mark.sample(2)
def test_killed_stages_go_on_from_their_checkpoint(
    keep: Keep, wanted: list[Any], tmp_path: Path, victims: tuple[int, ...], phases: tuple[str, ...]
) -> None:
    job = keep(training(tmp_path, victims, phases))
    same(job.values(), wanted)
    job.died_only(*((rank, n) for rank in victims for n in range(len(phases))))
    each_sample_once(job)
    for rank in victims:  # its first process; then each replacement's first step, and on from the checkpoint
        first = list(range(AT + 1 if phases != ("checkpoint",) else 9))
        again = [*range(6, AT + 1)]
        expected = [*first, *(step for _ in phases[1:] for step in (0, *again)), 0, *range(6, STEPS)]
        assert steps_of(job, rank) == expected


def test_the_failpoint_at_a_step_s_begin(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    run = training(tmp_path)

    def told(context: harness.Context) -> Any:
        job = ftcomm.torch.communicator().job
        job.add_listener(lambda event: event["event"] == "step" and context.mark("told", event["step"]))
        return run(context)

    job = keep(told, faults=f"rank=1,at=step:{AT},do=kill")
    same(job.values(), wanted)
    job.died_only((1, 0))
    assert steps_of(job, 1) == [*range(AT), 0, *range(6, STEPS)]
    assert job.marks(1, "told") == [*range(AT + 1), 0, *range(6, STEPS + 1)]  # the end of the run is told as one, too


@pytest.mark.parametrize(
    "point",
    [
        "checkpoint.mark.before",
        *(pytest.param(p, marks=TABLE) for p in ("checkpoint.mark.after", "checkpoint.collect", "checkpoint.resume")),
    ],
)
def test_killed_in_the_commit(keep: Keep, wanted: list[Any], tmp_path: Path, point: str) -> None:
    nth = 1 if point == "checkpoint.resume" else 2
    job = keep(training(tmp_path), faults=f"rank=1,at={point}:{nth},do=kill")
    same(job.values(), wanted)
    assert job.deaths == [(1, 0)]
    each_sample_once(job)


def stop_at(keep: Keep, folder: Path, step: int) -> TorchKeeper:
    """The job is in that step when all its processes die, and its log is gone with it."""
    job = keep(training(folder, until=step))
    job.run_until(lambda: all(steps_of(job, rank)[-1:] == [step] for rank in range(STAGES)))
    job.close()
    return job


@pytest.mark.parametrize("damage", [False, True])
def test_all_begin_anew(keep: Keep, wanted: list[Any], tmp_path: Path, damage: bool) -> None:
    """From the files alone, from the newest that all have; then a stage dies before the new log has a checkpoint."""
    stop_at(keep, tmp_path, 10)
    if damage:
        newest = max((tmp_path / "stage-2").iterdir())
        newest.write_bytes(newest.read_bytes()[:-100])
    begin = 6 if damage else 9
    job = keep(training(tmp_path, (1,), ("forward",)) if damage else training(tmp_path))
    same(job.values(), wanted)
    for rank in range(STAGES):
        count = 2 if damage and rank == 1 else 1
        assert [step for step in steps_of(job, rank) if step in (0, begin)] == [0, begin] * count
    log = job.group._processes[0, 0].result.log
    assert ("not all stages have the checkpoint of step 9 whole" in log) == damage
    assert f"goes on from the checkpoint of step {begin}" in log


def test_all_die_and_have_their_logs(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    job = keep(training(tmp_path, tuple(range(STAGES)), ("between",)))
    same(job.values(), wanted)
    each_sample_once(job)


def test_a_damaged_checkpoint_of_a_killed_stage(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    def spoil(job: Any, rank: int) -> None:
        (newest,) = (tmp_path / f"stage-{rank}").glob("step-*6-*.pt")
        newest.write_bytes(b"half a pick")

    job = keep(training(tmp_path, (2,), ("backward",)), on_death=spoil)
    same(job.values(), wanted)
    assert steps_of(job, 2)[AT + 1 :] == [0, *range(3, STEPS)]
    assert "trying the one before" in job.group._processes[2, 1].result.log


def test_without_checkpoints_a_replacement_does_all_again(keep: Keep, wanted: list[Any]) -> None:
    job = keep(training(None, (1,), ("update",)))
    same(job.values(), wanted)
    assert steps_of(job, 1)[AT + 1 :] == list(range(STEPS))
    assert "the log grows" in next(mark[2][1] for mark in job.group._marks if mark[1] == "chose")


def test_a_checkpoint_that_one_stage_cannot_write(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    """It counts for nobody, though the killed stage has written its own; the last one does."""
    job = keep(training(tmp_path, (1,), ("forward",), unwritten=(2, 5), checkpoint_every=5))
    same(job.values(), wanted)
    assert steps_of(job, 1)[AT + 1 :] == list(range(STEPS))
    assert (2, "warning", "Training goes on without this checkpoint: the disk is full") in job.group._marks
    for rank in range(STAGES):
        assert max((tmp_path / f"stage-{rank}").iterdir()).name.startswith(f"step-{STEPS:09}-")


def test_checkpoints_that_do_not_count_push_out_none(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    """One stage can't write those of steps 4 and 6; the others keep that of step 2, whatever ``keep`` says."""
    job = keep(training(tmp_path, (1,), ("forward",), unwritten=(2, 4, 6), checkpoint_every=2, keep=2))
    same(job.values(), wanted)
    assert steps_of(job, 1)[AT + 1 :] == [0, *range(2, STEPS)]


def test_the_one_before_the_last_stays_until_another_counts(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    """That of step 6 can't be written by one stage, and that of step 4 is damaged: that of step 2 is still there."""

    def spoil(job: Any, rank: int) -> None:
        (newest,) = (tmp_path / f"stage-{rank}").glob("step-*4-*.pt")
        newest.write_bytes(b"half a pick")

    how: dict[str, Any] = {"unwritten": (2, 6), "checkpoint_every": 2, "keep": 2}
    job = keep(training(tmp_path, (1,), ("forward",), **how), on_death=spoil)
    same(job.values(), wanted)
    assert steps_of(job, 1)[AT + 1 :] == [0, *range(2, STEPS)]


def test_gradients_of_the_first_step_do_not_stay(keep: Keep, tmp_path: Path) -> None:
    """Updates every other step: the first one ends with gradients, and the checkpoint is loaded over it."""
    how: dict[str, Any] = {"update_every": 2, "checkpoint_every": 4}
    first = keep(training(tmp_path / "undisturbed", **how)).values()
    job = keep(training(tmp_path / "killed", (2,), ("forward",), **how))
    same(job.values(), first)
    assert steps_of(job, 2)[AT + 1 :] == [0, *range(4, STEPS)]


def replicas(folder: Path, victim: int = -1) -> Callable[[harness.Context], Any]:
    def run(context: harness.Context) -> Any:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, WIDTH))
        model = DistributedDataParallel(net, bucket_cap_mb=0.001)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        engine = ftcomm.recovery.Engine(model, optimizer, checkpoint_dir=folder, checkpoint_every=2)
        loader = DataLoader(TensorDataset(INPUTS, torch.arange(SAMPLES)), batch_size=2, shuffle=True)
        for step, (inputs, numbers) in engine.steps(loader, epochs=EPOCHS):
            context.mark("step", (step, engine.epoch, tuple(numbers.tolist())))
            with engine.step():
                nn.functional.mse_loss(model(inputs), inputs.sin()).backward()
                if context.rank == victim and context.incarnation == 0 and step == AT:
                    context.die()
                optimizer.step()
                optimizer.zero_grad()
        return engine.strategy.name, digest(net, optimizer)

    return run


def test_replicas_are_replayed_too(keep: Keep, tmp_path: Path) -> None:
    first = keep(replicas(tmp_path / "undisturbed")).values()
    job = keep(replicas(tmp_path / "killed", 2))
    assert job.values() == first
    assert {name for name, _ in first} == {"replay"}
    assert steps_of(job, 2)[AT + 1 :] == [0, *range(6, STEPS)]
    for epoch in range(EPOCHS):
        used = {value[2] for _, name, value in job.group._marks if name == "step" and value[1] == epoch}
        assert sorted(n for numbers in used for n in numbers) == list(range(SAMPLES))


def refusals(folder: Path) -> Callable[[harness.Context], list[str]]:
    def run(context: harness.Context) -> list[str]:
        layers = layers_of(0)
        optimizer = torch.optim.SGD(layers.parameters(), 0.1)
        made = ftcomm.recovery.Engine
        stage = pipelining.PipelineStage(layers, context.rank, STAGES, torch.device("cpu"))
        said: list[str] = []

        def refused(fn: Callable[[], Any]) -> None:
            with pytest.raises(ftcomm.ConfigError) as caught:
                fn()
            said.append(str(caught.value))

        refused(lambda: made(stage, optimizer))
        refused(lambda: made(layers, optimizer, checkpoint_dir=folder, keep=1))
        refused(lambda: made(layers, optimizer, checkpoint_dir=folder, seed=None))
        refused(lambda: made(layers, optimizer, strategy="replication"))
        refused(lambda: next(made(layers, optimizer).steps(DataLoader(TensorDataset(INPUTS), batch_size=7))))
        return said

    return run


def test_refusals(keep: Keep, tmp_path: Path) -> None:
    said = keep(refusals(tmp_path)).values()[0]
    words = ["PipelineStage", "keep=2", "Give a seed", "--policy lossy", "drop_last=True"]
    assert len(said) == len(words)
    for text, word in zip(said, words, strict=True):
        assert word in text


def test_an_update_before_each_checkpoint(keep: Keep, tmp_path: Path) -> None:
    def run(context: harness.Context) -> str:
        layers = layers_of(context.rank)
        optimizer = torch.optim.SGD(layers.parameters(), 0.1)
        schedule = schedule_of(layers)
        engine = ftcomm.recovery.Engine(layers, optimizer, checkpoint_dir=tmp_path, checkpoint_every=3)
        with pytest.raises(ftcomm.ConfigError, match="made no update") as caught:
            for step, (inputs,) in engine.steps(DataLoader(TensorDataset(INPUTS), batch_size=BATCH)):
                with engine.step():
                    run_schedule(schedule, inputs)
                    if step % 2:
                        optimizer.step()
        return str(caught.value)

    assert all("checkpoint_every" in text for text in keep(run).values())


@pytest.mark.table
def test_many_kills_in_one_run(keep: Keep, tmp_path: Path) -> None:
    """20 at random moments, in starts and replays as well."""
    undisturbed = keep(training(tmp_path / "undisturbed", epochs=LONG, checkpoint_every=20)).values(300.0)
    job = keep(training(tmp_path / "killed", epochs=LONG, checkpoint_every=20))
    assert job.kill_at_random(20, "pipeline") == 20
    same(job.values(300.0), undisturbed)
    each_sample_once(job, LONG)
