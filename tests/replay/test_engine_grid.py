"""The engine with a pipeline whose stages are replicated: three process groups on each rank, one checkpoint of all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch_store as torch_store_process

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from kept import digest  # noqa: E402
from test_engine_pipeline import same as same_run  # noqa: E402
from test_engine_pipeline import steps_of  # noqa: E402
from test_lost_logs import another_host, empty_disk  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch_keeper import Keep, TorchKeeper, kept  # noqa: E402

import ftcomm  # noqa: E402
import ftcomm.recovery  # noqa: E402
import ftcomm.torch  # noqa: E402
from ftcomm.recovery.data.seeded import mixed  # noqa: E402
from ftcomm.recovery.engine.restorable import reseed  # noqa: E402

STAGES = COPIES = 2
SIZE, GROUPS = STAGES * COPIES, 3
WIDTH, BATCH, EPOCHS, EVERY = 16, 8, 2, 3
SAMPLES = 6 * BATCH * COPIES
STEPS = EPOCHS * 6
AT = 7  # the step in which somebody dies; the newest checkpoint is then that of step 6
LONG = 40  # epochs
TABLE = pytest.mark.table
INPUTS = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


@pytest.fixture
def keep(ranks: harness.Ranks, torch_store: tuple[str, int]) -> Iterator[Keep]:
    yield from kept(ranks, torch_store, SIZE)


class Place:
    """Of a rank in the grid: its stage, and which copy of it; ranks 0 and 1 are one pipeline, 2 and 3 the other one."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (COPIES, STAGES), mesh_dim_names=("copy", "stage"))
        stages, copies = mesh.get_group("stage"), mesh.get_group("copy")
        self.number, self.copy = dist.get_rank(stages), dist.get_rank(copies)
        torch.manual_seed(self.number)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
        self.model = DistributedDataParallel(self.layers, process_group=copies, bucket_cap_mb=0.001)
        stage = pipelining.PipelineStage(self.model, self.number, STAGES, torch.device("cpu"), group=stages)
        self.schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2, foreach=False)

    def train(self, inputs: Any) -> list[float]:
        losses: list[Any] = []
        if self.number == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=inputs.sin(), losses=losses)
        return [loss.item() for loss in losses]

    def digest(self) -> str:
        return digest(self.layers, self.optimizer)


def training(
    folder: Path,
    victims: tuple[int, ...] = (),
    phases: tuple[str, ...] = (),
    epochs: int = EPOCHS,
    until: int = 0,
    singles: bool = False,
) -> Callable[[harness.Context], Any]:
    """Losses of the last process, digest, steps. The victims' processes of incarnation n die where the nth of the phases is.
    ``until``: all stay where that step begins. ``singles``: each rank has a group of its own as well."""

    def run(context: harness.Context) -> Any:
        alone = [dist.new_group([rank]) for rank in range(SIZE)][context.rank] if singles else None
        place = Place()
        engine = ftcomm.recovery.Engine(place.model, place.optimizer, checkpoint_dir=folder, checkpoint_every=EVERY)
        phase = phases[context.incarnation] if context.rank in victims and context.incarnation < len(phases) else ""
        now = -1

        def at(where: str) -> None:
            if phase == where and now == AT:
                context.die()

        place.layers.register_forward_hook(lambda *_: at("forward"))
        place.layers.register_full_backward_pre_hook(lambda *_: at("backward"))
        place.optimizer.register_step_post_hook(lambda *_: at("update"))
        context.mark("running")
        losses: dict[int, list[float]] = {}
        loader = DataLoader(TensorDataset(INPUTS, torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True)
        for now, (inputs, numbers) in engine.steps(loader, epochs=epochs):
            context.mark("step", (now, place.copy, engine.epoch, tuple(numbers.tolist())))
            if until and now == until:
                context.hold()
            with engine.step():
                losses[now] = place.train(inputs)
                place.optimizer.step()
                place.optimizer.zero_grad()
            if alone is not None:
                said = torch.tensor([now, 1])
                dist.all_reduce(said, group=alone)
                assert said.tolist() == [now, 1], "and not what was said in an older step"
        return losses, place.digest(), engine.step_number

    return run


def plain(context: harness.Context) -> Any:
    """What the engine's user would write by hand."""
    place = Place()
    losses: dict[int, list[float]] = {}
    torch.use_deterministic_algorithms(True)
    for step in range(STEPS):
        epoch, at = divmod(step, STEPS // EPOCHS)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mixed(0, epoch)))
        first = (at * COPIES + place.copy) * BATCH
        reseed(0, step, context.rank)
        losses[step] = place.train(INPUTS[order[first : first + BATCH]])
        place.optimizer.step()
        place.optimizer.zero_grad()
    return losses, place.digest(), STEPS


_known: list[Any] = []


@pytest.fixture
def wanted(keep: Keep) -> list[Any]:
    if not _known:
        _known.extend(keep(plain).values())
    return _known


def same(values: list[Any], wanted: list[Any]) -> None:
    same_run(values, wanted)
    assert len({value[1] for value in values}) == STAGES  # replicas are equal


def each_sample_once(job: TorchKeeper, epochs: int = EPOCHS) -> None:
    """Both stages of a pipeline had the same batch in each step, however often, and each sample was in one step of each epoch."""
    batches: dict[tuple[int, int], Any] = {}
    for _, name, value in job.group._marks:
        if name == "step":
            step, copy, *what = value
            assert batches.setdefault((step, copy), what) == what
    for epoch in range(epochs):
        assert sorted(n for at, ns in batches.values() if at == epoch for n in ns) == list(range(SAMPLES))


def test_undisturbed(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    job = keep(training(tmp_path))
    same(job.values(), wanted)
    each_sample_once(job)


@pytest.mark.parametrize(
    ("victims", "phases"),
    [
        pytest.param((1,), ("forward",), id="forward"),
        pytest.param((2,), ("backward",), marks=TABLE, id="backward"),
        pytest.param((0,), ("update",), id="update"),
        pytest.param((1, 3), ("forward",), id="both-copies-of-a-stage"),
        pytest.param((2,), ("forward", "backward"), id="twice"),
        *(
            pytest.param(victims, (phase,), marks=TABLE, id=f"{'-'.join(map(str, victims))}-{phase}")
            for victims in ((0,), (1,), (2,), (3,), (0, 1), (0, 2), (0, 3), (1, 2), (0, 1, 2, 3))
            for phase in ("forward", "backward", "update")
        ),
    ],
)
@pytest.mark.sample(2)
def test_whoever_dies_goes_on_from_its_replicas_state(
    keep: Keep, wanted: list[Any], tmp_path: Path, victims: tuple[int, ...], phases: tuple[str, ...]
) -> None:
    """Or from its checkpoint, if there is none, or it has made the update that the victim died in."""
    job = keep(training(tmp_path, victims, phases))
    same(job.values(), wanted)
    assert {rank for rank, _ in job.deaths} == {*victims}
    each_sample_once(job)
    if len(victims) == 1:
        goes_on = 6 if phases == ("update",) else AT
        again = [*range(goes_on, AT + 1)]
        expected = [*range(AT + 1), *(step for _ in phases[1:] for step in (0, *again)), 0, *range(goes_on, STEPS)]
        assert steps_of(job, victims[0]) == expected
    for rank in victims:
        if rank ^ COPIES not in victims:
            served = f"goes on at step {AT}, with the state of rank {rank ^ COPIES}" in job.said(rank)
            assert served == (phases != ("update",))


@pytest.mark.parametrize(
    ("victims", "phases"), [((2,), ("forward", "update")), pytest.param((0, 1, 2, 3), ("backward",), marks=TABLE)]
)
def test_with_groups_of_one_rank(
    keep: Keep, wanted: list[Any], tmp_path: Path, victims: tuple[int, ...], phases: tuple[str, ...]
) -> None:
    job = keep(training(tmp_path, victims, phases, singles=True))
    same(job.values(), wanted)
    assert {rank for rank, _ in job.deaths} == {*victims}
    each_sample_once(job)


@pytest.mark.parametrize("how", [empty_disk, another_host])
def test_without_the_log_of_who_died(keep: Keep, wanted: list[Any], tmp_path: Path, how: Any) -> None:
    """Its groups' logs come from the others in them; a group of its own begins anew."""
    hosts = [f"host-{rank}" for rank in range(SIZE)]
    job = keep(training(tmp_path, (2,), ("backward",), singles=True), transport="tcp", hosts=hosts, on_death=how)
    same(job.values(), wanted)
    assert job.deaths == [(2, 0)]
    assert steps_of(job, 2) == [*range(AT + 1), 0, *range(6, STEPS)]
    each_sample_once(job)


# Each rank marks a checkpoint in three logs, one after another: the second checkpoint is the 4th to the 6th mark.
MARKS = [
    *(("checkpoint.resume", nth) for nth in range(1, GROUPS + 1)),
    *((f"checkpoint.mark.{side}", nth) for side in ("before", "after") for nth in range(1, 3 * GROUPS + 1)),
    *(("checkpoint.collect", nth) for nth in range(1, GROUPS + 1)),
]
SHORT = {
    ("checkpoint.resume", 2),
    ("checkpoint.mark.before", 6),
    ("checkpoint.mark.after", 4),
}


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=TABLE)])
@pytest.mark.parametrize(
    ("point", "nth"),
    [pytest.param(*one, marks=() if one in SHORT else TABLE, id="{}:{}".format(*one)) for one in MARKS],
)
@pytest.mark.sample(1)
def test_killed_between_the_groups_marks(
    keep: Keep, wanted: list[Any], tmp_path: Path, point: str, nth: int, victim: int
) -> None:
    """Some of its logs have the mark, others do not."""
    job = keep(training(tmp_path), faults=f"rank={victim},at={point}:{nth},do=kill")
    same(job.values(), wanted)
    assert job.deaths == [(victim, 0)]
    each_sample_once(job)


def test_a_damaged_checkpoint_of_who_died_between_the_marks(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    """Two groups have that of step 9, the default one that of step 6, whose file is damaged: all go on from that of step 3."""

    def spoil(job: Any, rank: int) -> None:
        (damaged,) = (tmp_path / f"stage-{rank}").glob("step-*6-*.pt")
        damaged.write_bytes(b"half a pick")

    job = keep(training(tmp_path), faults=f"rank=1,at=checkpoint.mark.before:{3 * GROUPS},do=kill", on_death=spoil)
    same(job.values(), wanted)
    assert steps_of(job, 1) == [*range(9), 0, *range(3, STEPS)]


def test_all_die_and_begin_anew_without_their_logs(keep: Keep, wanted: list[Any], tmp_path: Path) -> None:
    job = keep(training(tmp_path, until=10))
    job.run_until(lambda: all(steps_of(job, rank)[-1:] == [10] for rank in range(SIZE)))
    job.close()
    job = keep(training(tmp_path))
    same(job.values(), wanted)
    assert all(steps_of(job, rank) == [0, *range(9, STEPS)] for rank in range(SIZE))


@TABLE
@pytest.mark.parametrize("seed", range(1, 6))
def test_kills_at_random_moments(keep: Keep, tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    first = keep(training(tmp_path / "undisturbed", epochs=LONG)).values()
    job = keep(training(tmp_path / "killed", epochs=LONG))
    for _ in range(6):
        rank, steps = random_.randrange(SIZE), random_.randrange(3, 25)
        begun = len(steps_of(job, rank))
        job.run_until(lambda rank=rank, upto=begun + steps: len(steps_of(job, rank)) >= upto)
        job.kill(rank)
    values = job.values()
    assert [value[1:] for value in values] == [value[1:] for value in first]
    each_sample_once(job, LONG)
    assert len(job.deaths) == 6


def test_groups_that_come_and_go_are_refused(keep: Keep, tmp_path: Path) -> None:
    def run(context: harness.Context) -> str:
        place = Place()
        engine = ftcomm.recovery.Engine(place.model, place.optimizer, checkpoint_dir=tmp_path, checkpoint_every=EVERY)
        loader = DataLoader(TensorDataset(INPUTS), batch_size=BATCH)
        with pytest.raises(ftcomm.ConfigError) as caught:
            for step, (inputs,) in engine.steps(loader):
                with engine.step():
                    place.train(inputs)
                    place.optimizer.step()
                    place.optimizer.zero_grad()
                if step == 1:
                    dist.new_group([*range(SIZE)])
        return str(caught.value)

    for said in keep(run).values():
        assert "Make groups before engine.steps()" in said


def test_communicators_that_are_no_groups_are_refused(keep: Keep, tmp_path: Path) -> None:
    def run(context: harness.Context) -> str:
        place = Place()
        engine = ftcomm.recovery.Engine(place.model, place.optimizer, checkpoint_dir=tmp_path, checkpoint_every=EVERY)
        ftcomm.torch.communicator().dup().close()
        twin = ftcomm.torch.communicator().dup()
        with pytest.raises(ftcomm.ConfigError) as caught:
            for _, (inputs,) in engine.steps(DataLoader(TensorDataset(INPUTS), batch_size=BATCH)):
                with engine.step():
                    place.train(inputs)
                    place.optimizer.step()
                    place.optimizer.zero_grad()
        twin.barrier()
        return str(caught.value)

    for said in keep(run).values():
        assert "no process groups" in said
        assert said.count(".dup") == 1


def test_log_groups_are_refused(keep: Keep, tmp_path: Path) -> None:
    def run(context: harness.Context) -> str:
        dist.new_group([*range(SIZE)])
        layers = nn.Linear(2, 2)
        engine = ftcomm.recovery.Engine(layers, torch.optim.SGD(layers.parameters(), 0.1), checkpoint_dir=tmp_path)
        with pytest.raises(ftcomm.ConfigError) as caught:
            next(engine.steps(DataLoader(TensorDataset(INPUTS), batch_size=BATCH)))
        dist.barrier()
        return str(caught.value)

    for said in keep(run, log=((0, 1), (2, 3))).values():
        assert "log='all'" in said


def test_a_last_step_of_fewer_samples_is_refused(keep: Keep, tmp_path: Path) -> None:
    def run(context: harness.Context) -> str:
        place = Place()
        engine = ftcomm.recovery.Engine(place.model, place.optimizer, checkpoint_dir=tmp_path)
        with pytest.raises(ftcomm.ConfigError) as caught:
            next(engine.steps(DataLoader(TensorDataset(INPUTS), batch_size=5)))
        dist.barrier()
        return str(caught.value)

    assert "6 samples, shared out over 2 replicas, not 10" in keep(run).values()[0]
