"""Strategy parallel-replay: the survivors compute a replacement's micro-batches, to the bits of a run in which nobody died."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch_store as torch_store_process

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from test_engine_pipeline import digest, same, steps_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch_keeper import Keep, TorchKeeper, kept  # noqa: E402

import ftcomm.recovery  # noqa: E402
import ftcomm.torch  # noqa: E402
from ftcomm.recovery.data.seeded import mixed  # noqa: E402
from ftcomm.recovery.engine.parallel import ghost, service  # noqa: E402
from ftcomm.recovery.engine.restorable import reseed  # noqa: E402

STAGES, WIDTH, MICRO = 4, 33, 6
BATCH = 4 * MICRO
SAMPLES, EPOCHS, EVERY = 6 * BATCH, 2, 4
STEPS = EPOCHS * SAMPLES // BATCH
AT = 10  # who dies in that step has done steps 8 and 9 since its checkpoint; and from there on 11 steps without any
INPUTS = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


@pytest.fixture
def keep(ranks: harness.Ranks, torch_store: tuple[str, int]) -> Iterator[Keep]:
    yield from kept(ranks, torch_store, STAGES)


class Layers(nn.Module):
    """Has what the sum of gradients could go wrong with: tied weights, a parameter without gradients, a frozen one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.idle = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs)))) + self.frozen


class Dropped(Layers):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(inputs), 0.1)


class Counted(Layers):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)


class Rebound(Layers):
    """Its buffer is another tensor after each forward pass."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.125
        return super().forward(inputs - self.mean)


class OwnGenerator(Layers):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.generator = torch.Generator().manual_seed(rank)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + torch.rand(WIDTH, generator=self.generator)


class Written(Layers):
    """Its parameters are changed behind the back of torch's counters."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.frozen.data.mul_(1.25)
        return super().forward(inputs)


class Unpicklable(Layers):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.name = lambda: "a closure"


class Remote(Layers):
    """Takes a factor that its pickle does not have."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.factor = 2.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.factor

    def __getstate__(self) -> Any:
        return {**vars(self), "factor": 1.0}


OUTSIDE = nn.Parameter(torch.ones(WIDTH))


class Outside(Layers):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * OUTSIDE


class Talking(Layers):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            dist.send(torch.zeros(1), 3)
        return super().forward(inputs)


def schedule_of(layers: nn.Module, kind: str = "Schedule1F1B") -> Any:
    stage = pipelining.PipelineStage(layers, dist.get_rank(), STAGES, torch.device("cpu"))
    return getattr(pipelining, kind)(stage, MICRO, loss_fn=nn.functional.mse_loss)


def one_step(schedule: Any, layers: nn.Module, optimizer: Any, inputs: Any) -> list[float]:
    """With what scripts do between the backward pass and the update: it needs the gradients."""
    losses: list[Any] = []
    outputs = None
    if dist.get_rank() == 0:
        schedule.step(inputs)
    elif dist.get_rank() == STAGES - 1:
        outputs = schedule.step(target=inputs.sin(), losses=losses)
    else:
        schedule.step()
    norm = nn.utils.clip_grad_norm_(layers.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    seen = [] if outputs is None else [outputs.double().sum().item()]
    return [*(loss.item() for loss in losses), norm.item(), *seen]


def plain(kind: str = "Schedule1F1B", make: Any = Layers) -> Callable[[harness.Context], Any]:
    def run(context: harness.Context) -> Any:
        layers = make(context.rank)
        schedule = schedule_of(layers, kind)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2, foreach=False)
        losses: dict[int, list[float]] = {}
        torch.use_deterministic_algorithms(True)
        for step in range(STEPS):
            epoch, at = divmod(step, SAMPLES // BATCH)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mixed(0, epoch)))
            reseed(0, step, context.rank)
            losses[step] = one_step(schedule, layers, optimizer, INPUTS[order[at * BATCH : (at + 1) * BATCH]])
        return losses, digest(layers, optimizer), STEPS

    return run


def training(
    folder: Path | None,
    victims: tuple[int, ...] = (),
    kind: str = "Schedule1F1B",
    make: Any = Layers,
    prepare: Callable[[harness.Context], None] | None = None,
    at: int = AT,
    change: Callable[[int, Any], None] | None = None,
    **loading: Any,
) -> Callable[[harness.Context], Any]:
    """The victims' first processes die in the middle of that step."""

    def run(context: harness.Context) -> Any:
        layers = make(context.rank)
        schedule = schedule_of(layers, kind)
        optimizer = torch.optim.Adam(layers.parameters(), 1e-2, foreach=False)
        engine = ftcomm.recovery.Engine(
            layers,
            optimizer,
            "parallel-replay",
            folder,
            checkpoint_every=EVERY,
            schedule=schedule,
        )
        ftcomm.torch.communicator()._job.add_listener(
            lambda e: (
                context.mark(e["event"], {**e, "rank": context.rank})
                if e["event"] in ("parallel-replay", "helped")
                else None
            )
        )
        if prepare is not None:
            prepare(context)
        context.mark("running")
        losses: dict[int, list[float]] = {}
        forward, now, calls = schedule._stage.forward_one_chunk, [-1], [0]

        def until_death(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if (
                context.rank in victims
                and now[0] == at
                and calls[0] == 3 - victims.index(context.rank)
                and context.incarnation == 0
            ):
                context.die()
            return forward(*args, **kwargs)

        schedule._stage.forward_one_chunk = until_death
        loader = DataLoader(TensorDataset(INPUTS, torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True, **loading)
        for step, (inputs, _) in engine.steps(loader, epochs=EPOCHS):
            context.mark("step", (step,))
            now[0], calls[0] = step, 0
            if change is not None:
                change(step, layers)
            with engine.step():
                losses[step] = one_step(schedule, layers, optimizer, inputs)
        assert "step" not in vars(schedule)
        return losses, digest(layers, optimizer), engine.step_number

    return run


def events(job: TorchKeeper, name: str) -> list[Any]:
    return [value for _, what, value in job.group._marks if what == name]


def log_of(job: TorchKeeper, rank: int, incarnation: int = 1) -> str:
    return str(job.group._processes[rank, incarnation].result.log)


_known: dict[Any, list[Any]] = {}


@pytest.fixture
def wanted(keep: Keep) -> Callable[..., list[Any]]:
    def of(kind: str = "Schedule1F1B", make: Any = Layers) -> list[Any]:
        if (kind, make) not in _known:
            _known[kind, make] = keep(plain(kind, make)).values()
        return _known[kind, make]

    return of


TABLE = pytest.mark.table


@pytest.mark.parametrize("victim", [pytest.param(0, marks=TABLE), 1, pytest.param(2, marks=TABLE), 3])
def test_all_share_the_steps_of_a_killed_stage(keep: Keep, wanted: Any, victim: int) -> None:
    """Without checkpoints: all steps but the first one, and the one that only the first one's size leaves out."""
    job = keep(training(None, (victim,)))
    same(job.values(), wanted())
    assert job.deaths == [(victim, 0)]
    assert "alone" not in log_of(job, victim), log_of(job, victim)
    (event,) = events(job, "parallel-replay")
    assert event["steps"] == AT - 1
    others = [str(rank) for rank in range(STAGES) if rank != victim]
    assert sorted(event["helpers"]) == others
    assert sum(event["helpers"].values()) == 4 * (AT - 1), "a fourth is the replacement's own: 2 of 6"
    assert event["left_out"] == {}
    assert sum(e["micro_batches"] for e in events(job, "helped")) == 4 * (AT - 1)
    assert steps_of(job, victim)[AT + 1 :] == list(range(STEPS))


def refusals(context: harness.Context) -> list[str]:
    layers = Layers(context.rank)
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    said = []
    for more in ({}, {"schedule": layers}):
        with pytest.raises(ftcomm.ConfigError) as caught:
            ftcomm.recovery.Engine(layers, optimizer, "parallel-replay", **more)
        said.append(str(caught.value))
    return said


def test_without_a_schedule(keep: Keep) -> None:
    missing, wrong = keep(refusals).values()[0]
    assert "schedule=schedule" in missing
    assert "not Layers" in wrong


def test_from_a_checkpoint_with_another_schedule(keep: Keep, wanted: Any, tmp_path: Path) -> None:
    """The update between two steps, and the optimizer's state, are of the checkpoint; the last stage is the one with the loss."""
    job = keep(training(tmp_path, (3,), "ScheduleGPipe"))
    same(job.values(), wanted("ScheduleGPipe"))
    (event,) = events(job, "parallel-replay")
    assert (event["steps"], len(event["helpers"])) == (AT - 8, 3)
    assert steps_of(job, 3)[AT + 1 :] == [0, *range(8, STEPS)]


def test_two_stages_at_once(keep: Keep, wanted: Any) -> None:
    """Both are served by the others. (Not by each other: tests/recovery/test_parallel_work.py.)"""
    job = keep(training(None, (1, 2)))
    same(job.values(), wanted())
    assert sorted(job.deaths) == [(1, 0), (2, 0)]
    both = events(job, "parallel-replay")
    assert [event["rank"] for event in sorted(both, key=lambda e: e["rank"])] == [1, 2]
    for event in both:
        assert event["steps"] >= AT - 3, "one of them may wait for the other one's last steps"
        assert sum(event["helpers"].values()) > 0


def dies_helping(context: harness.Context) -> None:
    """Stage 0, in its seventh micro-batch for stage 2: the second of that step's."""
    compute, calls = service.compute, [0]

    def until_death(*args: Any) -> Any:
        calls[0] += 1
        if context.rank == 0 and context.incarnation == 0 and calls[0] == 7:
            context.die()
        return compute(*args)

    service.compute = until_death


def test_a_helper_dies(keep: Keep, wanted: Any) -> None:
    job = keep(training(None, (2,), prepare=dies_helping))
    same(job.values(), wanted())
    assert sorted(job.deaths) == [(0, 0), (2, 0)]
    (event,) = [event for event in events(job, "parallel-replay") if event["rank"] == 2]
    assert event["helpers"]["0"] == 6
    assert {*event["left_out"]} == {"0"}


def dies_again(context: harness.Context) -> None:
    ended, steps = ghost.Ghost.ended, [0]

    def until_death(self: Any, item: Any) -> None:
        if context.incarnation == 1 and len(self._items) == MICRO - 1:
            steps[0] += 1
            if steps[0] == 3:
                add, calls = ghost.add, [0]

                def half(module: Any, done: Any) -> None:
                    add(module, done)
                    calls[0] += 1
                    if calls[0] == MICRO // 2:
                        context.die()

                ghost.add = half
        ended(self, item)

    ghost.Ghost.ended = until_death  # type: ignore[method-assign]


def test_the_replacement_dies_too(keep: Keep, wanted: Any) -> None:
    job = keep(training(None, (1,), prepare=dies_again))
    same(job.values(), wanted())
    assert job.deaths == [(1, 0), (1, 1)]
    (event,) = events(job, "parallel-replay")
    assert event["steps"] == AT - 1
    assert sum(event["helpers"].values()) == 4 * (AT - 1)
    assert log_of(job, 1, 2).count("alone") == 0


def slow(context: harness.Context) -> None:
    """Stage 0 takes for ever, until it is not needed any more."""
    compute = service.compute

    def waits(*args: Any) -> Any:
        if context.rank == 0:
            context.hold()
        return compute(*args)

    service.compute = waits


def test_a_slow_helper_is_left_out(keep: Keep, wanted: Any) -> None:
    job = keep(training(None, (2,), prepare=slow))
    job.run_until(lambda: any(event["rank"] == 2 for event in events(job, "parallel-replay")))
    job.group.release(0)
    same(job.values(), wanted())
    (event,) = events(job, "parallel-replay")
    assert event["left_out"] == {"0": "it took too long"}
    assert event["helpers"]["0"] == 0


def test_a_loader_whose_workers_outlive_the_loop(keep: Keep, wanted: Any) -> None:
    """They are forked in it, with all that is open then."""
    same(keep(training(None, num_workers=1, persistent_workers=True)).values(), wanted())


def raises(context: harness.Context) -> None:
    clip, calls = nn.utils.clip_grad_norm_, [0]

    def once(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if (context.rank, context.incarnation, calls[0]) == (1, 0, 4):
            raise RuntimeError("of the script")
        return clip(*args, **kwargs)

    nn.utils.clip_grad_norm_ = once  # type: ignore[assignment]


def test_a_body_that_raises_while_workers_run(keep: Keep, wanted: Any) -> None:
    job = keep(training(None, prepare=raises, num_workers=1))
    same(job.values(), wanted())
    assert job.deaths == [(1, 0)]
    assert "of the script" in job._errors[0]


def computes_wrong(context: harness.Context) -> None:
    """Stage 0 has a bit of the third stage wrong in its memory, once."""
    compute, calls = service.compute, [0]

    def flipped(module: Any, *args: Any) -> Any:
        calls[0] += 1
        if context.rank == 0 and calls[0] == 3:
            with torch.no_grad():
                module.norm.bias[:1].view(torch.int32).bitwise_xor_(1 << 22)
        return compute(module, *args)

    service.compute = flipped


def test_a_helper_computes_something_else(keep: Keep, wanted: Any) -> None:
    job = keep(training(None, (2,), prepare=computes_wrong))
    same(job.values(), wanted())
    (event,) = events(job, "parallel-replay")
    assert {*event["left_out"]} == {"0"}
    assert "it computes something else: its output (message #" in event["left_out"]["0"]
    assert (event["steps"], event["helpers"]["0"]) == (AT - 1, 2)


class Ranked(Layers):
    """Is another one on each rank."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * (1 + dist.get_rank() / 8)


@pytest.mark.parametrize("victim", [1, pytest.param(3, marks=TABLE)])
def test_all_helpers_compute_something_else(keep: Keep, wanted: Any, victim: int) -> None:
    job = keep(training(None, (victim,), make=Ranked))
    same(job.values(), wanted(make=Ranked))
    (event,) = events(job, "parallel-replay")
    assert event["steps"] == AT - 1
    assert sorted(event["left_out"]) == [str(rank) for rank in range(STAGES) if rank != victim]
    assert sum(event["helpers"].values()) == 0


def rescaled(step: int, layers: Any) -> None:
    """The script changes the module between steps: a buffer, a parameter, and what it does."""
    layers.calls.fill_(step)
    layers.factor = 1.0 + step / 8
    with torch.no_grad():
        layers.frozen.add_(0.25)


class Rescaled(Counted):
    factor = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Layers.forward(self, inputs) * self.factor + self.calls / 16


def test_what_the_script_changes_between_steps(keep: Keep) -> None:
    undisturbed = keep(training(None, make=Rescaled, change=rescaled)).values()
    job = keep(training(None, (1,), make=Rescaled, change=rescaled))
    same(job.values(), undisturbed)
    assert events(job, "parallel-replay")[0]["steps"] == AT - 1


class Changing(Layers):
    """Does what the script tells it to."""

    rate = 0.0
    asks = counts = False

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.asks and dist.get_rank() == 1:
            dist.send(torch.zeros(1), 3)
        if self.counts:
            self.calls = self.calls + 1
        outputs = super().forward(inputs)
        return nn.functional.dropout(outputs, self.rate) if self.rate else outputs


CHANGED = 5  # before that step


def drops(layers: Any) -> None:
    layers.rate = 0.1


def asks(layers: Any) -> None:
    layers.asks = True


def counts(layers: Any) -> None:
    layers.counts = True


def hooks(layers: Any) -> None:
    layers.norm.register_forward_hook(lambda module, inputs, output: output * 2)


def hides(layers: Any) -> None:
    layers.name = lambda: "a closure"


def freezes(layers: Any) -> None:
    layers.norm.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("does", "victim", "why"),
    [
        (drops, 1, "uses the random generators"),
        (hides, 1, "cannot be pickled"),
        (freezes, 1, ""),
        pytest.param(counts, 1, "changes buffers", marks=TABLE),
        pytest.param(asks, 1, "a trial of it fails", marks=TABLE),
        pytest.param(hooks, 2, "has hooks", marks=TABLE),
    ],
)
def test_what_the_script_changes_at_last(keep: Keep, does: Any, victim: int, why: str) -> None:
    """The first step has shown nothing of it."""

    def change(step: int, layers: Any) -> None:
        if step == CHANGED:
            does(layers)

    undisturbed = keep(training(None, make=Changing, change=change)).values()
    job = keep(training(None, (victim,), make=Changing, change=change))
    same(job.values(), undisturbed)
    assert job.deaths == [(victim, 0)]
    (event,) = events(job, "parallel-replay")
    assert event["left_out"] == {}
    assert event["steps"] == (CHANGED - 1 if why else AT - 1)
    lines = [line for line in log_of(job, victim).splitlines() if "alone" in line]
    assert len(lines) == (1 if why else 0)
    assert not why or why in lines[0]


def anomalies(step: int, layers: Any) -> None:
    """Not in the first step: torch asks for shapes there, with NaN."""
    torch.autograd.set_detect_anomaly(step > 0)


def test_detection_of_anomalies(keep: Keep, wanted: Any) -> None:
    """What a ghost passes on is not content, but must not look like an error either."""
    job = keep(training(None, (1,), change=anomalies))
    same(job.values(), wanted())
    assert job.deaths == [(1, 0)]
    assert events(job, "parallel-replay")[0]["steps"] == AT - 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Dropped, "uses the random generators"),
        (Counted, "changes buffers or generators of the module"),
        (Rebound, "changes buffers or"),
        (OwnGenerator, "changes buffers or generators"),
        (Written, "changes parameters"),
        (Unpicklable, "cannot be pickled"),
        pytest.param(Remote, "a copy of the module", marks=TABLE),
        pytest.param(Outside, "not parameters of the module", marks=TABLE),
        pytest.param(Talking, "communicates", marks=TABLE),
    ],
)
def test_stages_that_are_not_shared(keep: Keep, make: Any, why: str) -> None:
    undisturbed = keep(training(None, make=make)).values()
    job = keep(training(None, (1,), make=make))
    same(job.values(), undisturbed)
    assert events(job, "parallel-replay") == []
    lines = [line for line in log_of(job, 1).splitlines() if "alone" in line]
    assert len(lines) == 1
    assert why in lines[0]


@pytest.mark.table
@pytest.mark.parametrize("log_mode", ["sync", "async"])
def test_between_hosts(keep: Keep, wanted: Any, log_mode: str) -> None:
    """The log of a stage's inputs is the half that its own host keeps."""
    job = keep(training(None, (1,)), hosts=["a", "b", "c", "d"], transport="tcp", log_mode=log_mode)
    same(job.values(), wanted())
    (event,) = events(job, "parallel-replay")
    assert event["steps"] == AT - 1


@pytest.mark.table
def test_log_groups_do_it_alone(keep: Keep, wanted: Any) -> None:
    job = keep(training(None, (1,)), hosts=["a", "a", "b", "b"], log=[[0, 1], [2, 3]])
    same(job.values(), wanted())
    assert events(job, "parallel-replay") == []
    assert "messages inside its log group are in no log" in log_of(job, 1)


@pytest.mark.table
def test_many_kills_in_one_run(keep: Keep, wanted: Any, tmp_path: Path) -> None:
    """At random moments, in shared steps as well; helpers and replacements alike."""
    job = keep(training(tmp_path))
    job.kill_at_random(12, "parallel")
    same(job.values(200.0), wanted())
