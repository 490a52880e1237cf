"""Replicas under the policy replay: whose state a replacement gets, and when none; and the bits of an undisturbed run."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch_store as torch_store_process

torch = pytest.importorskip("torch")
from kept import digest  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch_keeper import Keep, TorchKeeper, kept  # noqa: E402

import ftcomm  # noqa: E402
import ftcomm.recovery  # noqa: E402
from ftcomm.recovery.engine import twins  # noqa: E402

SIZE, WIDTH, BATCH, EVERY, STEPS, AT = 3, 16, 4, 6, 18, 10
GONE_ON = "it is at another step, or in another state"
INPUTS = torch.randn(SIZE * BATCH * STEPS, WIDTH, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


@pytest.fixture
def keep(ranks: harness.Ranks, torch_store: tuple[str, int]) -> Iterator[Keep]:
    yield from kept(ranks, torch_store, SIZE)


class Script:
    """Plain DistributedDataParallel with what scripts do besides: all of it has to be as it was at the begin of the step."""

    def __init__(self, context: harness.Context, folder: Path, *, norm: bool = False, every: int = 1, **settings: Any):
        torch.manual_seed(1)
        norms = nn.BatchNorm1d(WIDTH) if norm else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), norms, nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.001, **settings.pop("ddp", {}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, foreach=False)
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        self.average = AveragedModel(self.net)
        self.extra = {"average": self.average, "seen": torch.zeros(1, dtype=torch.int64), "notes": {"steps": []}}
        self.every = every
        self.engine = ftcomm.recovery.Engine(
            self.model,
            self.optimizer,
            scheduler=self.rates,
            extra=self.extra | settings.pop("extra", {}),
            checkpoint_dir=folder,
            checkpoint_every=EVERY,
        )
        self.context = context

    def run(self, at: Callable[[int, str], None]) -> Any:
        loader = DataLoader(TensorDataset(INPUTS), batch_size=BATCH, shuffle=True)
        for step, (inputs,) in self.engine.steps(loader):
            self.context.mark("step", step)
            if self.every == 1:
                for group in self.optimizer.param_groups:
                    group["weight_decay"] *= 0.99  # by hand, before the update
            with self.engine.step():
                at(step, "forward")
                loss = self.model(inputs).square().mean()
                at(step, "backward")
                loss.backward()
                at(step, "reduced")
                if (step + 1) % self.every == 0:
                    self.optimizer.step()
                    at(step, "updated")
                    self.rates.step()
                    self.average.update_parameters(self.net)
                    self.optimizer.zero_grad()
            self.engine.extra["seen"] += len(inputs)
            self.engine.extra["notes"]["steps"].append(step)
        seen, notes = self.engine.extra["seen"], self.engine.extra["notes"]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return digest(self.net, self.optimizer), digest(self.average, self.optimizer), int(seen), notes, str(settings)


def training(
    folder: Path,
    victims: tuple[int, ...] = (),
    phase: str = "backward",
    spoil: Callable[[harness.Context, Script], None] = lambda *_: None,
    **settings: Any,
) -> Callable[[harness.Context], Any]:
    """The victims' first processes die in step AT. ``spoil``: called in every process before the loop.

    They wait until all others have begun that step: one that is still in the step before has another state to give. With
    phase "reduced", until they have made its update: who is told of the death before that still has the state of its begin.
    """
    others = [rank for rank in range(SIZE) if rank not in victims]
    begun = {(by, to): folder.with_name(f"{folder.name}-begun-{by}-{to}") for by in others for to in victims}
    for path in begun.values():
        os.mkfifo(path)

    def run(context: harness.Context) -> Any:
        kept_open = []

        def at(step: int, where: str) -> None:
            if context.incarnation > 0 or step != AT:
                return
            if context.rank in others and where == ("updated" if phase == "reduced" else "forward"):
                for victim in victims:
                    kept_open.append(os.open(begun[context.rank, victim], os.O_RDWR))
                    os.write(kept_open[-1], b".")
            elif context.rank in victims and where == phase:
                for other in others:
                    with begun[other, context.rank].open("rb") as told:
                        told.read(1)
                context.die()

        script = Script(context, folder, **settings)
        spoil(context, script)
        context.mark("running")
        return script.run(at)

    return run


def check(keep: Keep, tmp_path: Path, victims: tuple[int, ...], goes_on: int, reason: str, **more: Any) -> TorchKeeper:
    """The victims end with what they would have, and go on there; ``reason``: of the last of them."""
    undisturbed = {name: value for name, value in more.items() if name != "phase"}
    wanted = keep(training(tmp_path / "undisturbed", **undisturbed)).values()
    job = keep(training(tmp_path / "killed", victims, **more))
    assert job.values() == wanted
    job.died_only(*((rank, 0) for rank in victims))
    for rank in victims:
        again = job.marks(rank, "step")
        assert again[again.index(0, 1) :] == [0, *range(goes_on, STEPS)]
    assert reason in job.said(victims[-1])
    return job


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.table)])
@pytest.mark.parametrize("phase", ["forward", "backward", "reduced"])
def test_plain_replicas(keep: Keep, tmp_path: Path, victim: int, phase: str) -> None:
    """Scheduler, average, values of the script and settings changed by hand are those of the begin of the step."""
    source = 1 if victim == 0 else 0
    if phase == "reduced":  # the others make the update meanwhile
        check(keep, tmp_path, (victim,), 6, GONE_ON, phase=phase)
    else:
        check(keep, tmp_path, (victim,), AT, f"with the state of rank {source}", phase=phase)


def test_two_of_three(keep: Keep, tmp_path: Path) -> None:
    check(keep, tmp_path, (0, 2), AT, f"goes on at step {AT}")


@pytest.mark.parametrize(("every", "goes_on"), [(2, 10), (3, 9)])
def test_gradients_of_several_steps(keep: Keep, tmp_path: Path, every: int, goes_on: int) -> None:
    """It goes on where there were none: after the last update."""
    check(keep, tmp_path, (1,), goes_on, f"goes on at step {goes_on}", every=every)


@pytest.mark.parametrize("ddp", [{"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_settings_of_ddp(keep: Keep, tmp_path: Path, ddp: dict[str, Any]) -> None:
    check(keep, tmp_path, (1,), AT, "with the state of rank 0", ddp=ddp)


def test_a_static_graph_is_refused(keep: Keep, tmp_path: Path) -> None:
    """Its buckets are ordered in an iteration that a replacement does not do at the same time as the others."""

    def run(context: harness.Context) -> str:
        with pytest.raises(ftcomm.ConfigError) as caught:
            Script(context, tmp_path, ddp={"static_graph": True})
        return str(caught.value)

    assert all("static_graph=True is not supported" in text for text in keep(run).values())


def test_buffers_of_its_own_are_in_its_checkpoint_only(keep: Keep, tmp_path: Path) -> None:
    """Batch normalisation: each replica has other averages than the one that gives them to all."""
    wanted = keep(training(tmp_path / "undisturbed", norm=True)).values()
    job = keep(training(tmp_path / "killed", (0,), norm=True))
    assert job.values() == wanted
    assert job.marks(0, "step")[AT + 1 :] == [0, *range(6, STEPS)]
    assert GONE_ON in job.said(0)


def _changes(context: harness.Context, script: Script) -> None:
    def change(*_: Any) -> None:
        if context.rank != 0 and script.engine.step_number == AT:
            with torch.no_grad():
                script.net[0].weight.mul_(1.0)

    script.net.register_forward_pre_hook(change)


def _sends_nothing(context: harness.Context, script: Script) -> None:
    twins.SILENT = 0.5
    if context.rank != 0:
        twins.Twins._serve = lambda _, line: line.socket.recv(1 << 20, socket.MSG_WAITALL)  # until it has gone


def _dies(context: harness.Context, script: Script) -> None:
    if context.rank == 1 and context.incarnation == 0:
        real = twins.framed

        def framed(content: Any) -> Any:
            real(content)
            context.die()

        twins.framed = framed


def _damages(context: harness.Context, script: Script) -> None:
    real = twins.checksum
    if context.rank != 0:
        twins.checksum = lambda buffer: real(buffer) ^ 1


def _buffer(script: Script) -> Any:
    for net in (script.net, script.average.module):
        net.register_buffer("counter", torch.zeros(2))
    return script.net.counter


def _counts(context: harness.Context, script: Script) -> None:
    """In a buffer, past the version counters, in each forward pass."""
    counter = _buffer(script)

    def count(*_: Any) -> None:
        counter.data.add_(1)

    script.net.register_forward_pre_hook(count)


def _replaces(context: harness.Context, script: Script) -> None:
    _buffer(script)

    def replace(*_: Any) -> None:
        script.net.counter = script.net.counter + 1

    script.net.register_forward_pre_hook(replace)


def _own_momenta(context: harness.Context, script: Script) -> None:
    """Of a replica alone, as where each keeps a share of the optimizer's state."""

    def keep_own(*_: Any) -> None:
        script.optimizer.state[script.net[0].bias]["own"] = torch.full((2,), float(context.rank))

    script.optimizer.register_step_post_hook(keep_own)


def _own_number(context: harness.Context, script: Script) -> None:
    def keep_own(*_: Any) -> None:
        script.optimizer.state[script.net[0].bias]["own"] = context.rank

    script.optimizer.register_step_post_hook(keep_own)


def _own_extra(context: harness.Context, script: Script) -> None:
    script.engine.extra["rank"] = context.rank


def _own_table(context: harness.Context, script: Script) -> None:
    """The same at both ends."""
    script.engine.extra["table"] = table = torch.zeros(100, 100)
    table[50, 50] = context.rank


def _goes_on(context: harness.Context, script: Script) -> None:
    real = twins.framed

    def framed(content: Any) -> Any:
        frame = real(content)
        if isinstance(content, dict):
            script.net[0].weight.detach().add_(0.0)
        return frame

    twins.framed = framed


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_changes, "its state has changed since the step began"),
        (_sends_nothing, "BlockingIOError"),
        (_damages, "its state came damaged"),
        (_counts, "its state has changed since the step began"),
        pytest.param(_replaces, "its state has changed since the step began", marks=pytest.mark.table),
        pytest.param(_own_momenta, "in another state", marks=pytest.mark.table),
        pytest.param(_own_number, "in another state", marks=pytest.mark.table),
        pytest.param(_own_extra, "in another state", marks=pytest.mark.table),
        (_own_table, "in another state"),
        (_goes_on, "its state changed while it was copied"),
    ],
)
@pytest.mark.sample(2)
def test_then_there_is_the_checkpoint(keep: Keep, tmp_path: Path, spoil: Any, reason: str) -> None:
    check(keep, tmp_path, (0,), 6, reason, spoil=spoil)


def test_what_cannot_be_loaded_is_in_the_checkpoint(keep: Keep, tmp_path: Path) -> None:
    """State of one rank only: the replica has another one."""

    def spoil(context: harness.Context, script: Script) -> None:
        twins.Beginning._digest = lambda *_, **__: 0  # as if it could not be told before
        if context.rank == 0:
            script.engine.extra["best"] = 0.5

    check(keep, tmp_path, (0,), 6, "a replica's state can't be loaded here", spoil=spoil)


def test_too_much_for_each_step(keep: Keep, tmp_path: Path) -> None:
    """Said once on each rank."""
    job = keep(training(tmp_path, (0,), extra={"log": [0.1] * 200_000}))
    job.values()
    assert job.said(1).count("replacements do not get this replica's state") == 1
    assert "goes on from the checkpoint of step 6" in job.said(0)


def test_who_dies_while_it_sends(keep: Keep, tmp_path: Path) -> None:
    """The other one sends."""
    wanted = keep(training(tmp_path / "undisturbed")).values()
    job = keep(training(tmp_path / "killed", (0,), spoil=_dies))
    assert job.values() == wanted
    job.died_only((0, 0), (1, 0))
    assert "with the state of rank 2" in job.said(0)


def test_again_and_again(keep: Keep, tmp_path: Path) -> None:
    """Whoever came back by a replica's state gives its own to the next one."""
    wanted = keep(training(tmp_path / "undisturbed")).values()
    job = keep(training(tmp_path / "killed"))
    for victim, step in ((0, 3), (1, 7), (0, 9), (2, 13)):
        job.run_until(lambda victim=victim, step=step: step in job.marks(victim, "step")[-3:])
        job.kill(victim)
    assert job.values() == wanted
    assert len(job.deaths) == 4
