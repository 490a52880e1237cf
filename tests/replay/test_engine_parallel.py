"""Strategy parallel-replay: the survivors compute a replacement's micro-batches, to the bits of a run in which nobody died."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch_store as torch_store_process

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from parallel_case import (  # noqa: E402
    AT,
    MICRO,
    STAGES,
    STEPS,
    Layers,
    events,
    log_of,
    plain_values,
    training,
)
from test_engine_pipeline import same, steps_of  # noqa: E402
from torch import nn  # noqa: E402
from torch_keeper import Keep, kept  # noqa: E402

import ftcomm.recovery  # noqa: E402
import ftcomm.torch  # noqa: E402
from ftcomm.recovery.engine.parallel import ghost, helpers, service  # noqa: E402


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


@pytest.fixture
def keep(ranks: harness.Ranks, torch_store: tuple[str, int]) -> Iterator[Keep]:
    yield from kept(ranks, torch_store, STAGES)


@pytest.fixture
def wanted(keep: Keep) -> Callable[..., list[Any]]:
    return functools.partial(plain_values, keep)


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
    job.died_only((1, 0), (2, 0))
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
    job.died_only((0, 0), (2, 0))
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
    helpers.SLACK = 1.0
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


@pytest.mark.table
@pytest.mark.parametrize("log_mode", ["sync", "async"])
def test_between_hosts(keep: Keep, wanted: Any, log_mode: str) -> None:
    """The log of a stage's inputs is the half that its own host keeps."""
    job = keep(training(None, (1,)), hosts=["a", "b", "c", "d"], transport="tcp", log_mode=log_mode)
    same(job.values(), wanted())
    (event,) = events(job, "parallel-replay")
    late = 1 if log_mode == "async" else 0  # steps at whose end its log may not have had all of it
    assert AT - 1 - late <= event["steps"] <= AT - 1


@pytest.mark.table
def test_many_kills_in_one_run(keep: Keep, wanted: Any, tmp_path: Path) -> None:
    """At random moments, in shared steps as well; helpers and replacements alike."""
    job = keep(training(tmp_path))
    job.kill_at_random(12, "parallel")
    same(job.values(200.0), wanted())
