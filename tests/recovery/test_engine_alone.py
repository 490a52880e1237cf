"""The engine in one process, without a process group: checkpoints, and what it refuses."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tables import most

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import ftcomm
from ftcomm.launch import preempt
from ftcomm.launch.launchers import Launcher, launcher
from ftcomm.recovery import Engine
from ftcomm.recovery.checkpoint_files import folder as folders
from ftcomm.recovery.strategies import Facts, choose

STEPS = 10


class Ended(Exception):
    pass


def train(folder: Path | None = None, end_at: int = -1, epochs: int = 2, **more: Any) -> tuple[Any, Engine]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = more.pop("schedule", CosineAnnealingLR)(optimizer, 40)
    data = TensorDataset(torch.arange(STEPS * 4 * 8.0).reshape(-1, 8).sin())
    extra = more.pop("extra", {"note": 7})
    engine = Engine(
        net,
        optimizer,
        "checkpoint" if folder else "auto",
        folder,
        scheduler=scheduler,
        extra=extra,
        checkpoint_every=3,
        **more,
    )
    for step, (x,) in engine.steps(DataLoader(data, 4, shuffle=True), epochs=epochs):
        if step == end_at:
            raise Ended
        with engine.step():
            net(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {name: value.tolist() for name, value in net.state_dict().items()}, engine


@pytest.mark.parametrize("end_at", most([6, 13], [4, 10]))
def test_goes_on_from_the_newest_checkpoint(tmp_path: Path, capsys: Any, end_at: int) -> None:
    with pytest.raises(Ended):
        train(tmp_path, end_at)
    weights, engine = train(tmp_path)
    assert weights == train(tmp_path / "other")[0]
    assert engine.step_number == 2 * STEPS
    assert f"goes on from the checkpoint of step {end_at // 3 * 3}" in capsys.readouterr().err


def test_a_run_that_is_over_is_not_done_again(tmp_path: Path) -> None:
    weights, _ = train(tmp_path)
    again, engine = train(tmp_path)
    assert again == weights
    assert engine.step_number == 2 * STEPS
    assert engine.extra == {"note": 7}
    longer, engine = train(tmp_path, epochs=3)
    assert longer != weights
    assert engine.step_number == 3 * STEPS


def test_plain_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    weights, _ = train(tmp_path)
    newest = max(tmp_path.glob("*.pt"))
    found = torch.load(newest, weights_only=True)
    assert {name: value.tolist() for name, value in found["model"].items()} == weights


def test_checkpoints_of_another_script_are_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(ftcomm.ConfigError, match="extra other"):
        train(tmp_path, extra={"note": 7, "other": 8})


@pytest.mark.parametrize("value", [{1, 2}, np.zeros(3)], ids=["set", "array"])
def test_extra_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ftcomm.ConfigError, match=r"can't be saved: state\['extra history'\] is a"):
        train(tmp_path, extra={"history": value}, end_at=0)


def test_what_is_put_into_extra_during_the_run_and_no_checkpoint_can_hold(tmp_path: Path) -> None:
    """Training goes on without the checkpoints, but the run does not end as if it had one."""
    extra: dict[str, Any] = {}

    class Later(CosineAnnealingLR):
        def step(self, *args: Any) -> None:  # first when it is made
            if self.last_epoch == 1:
                extra["history"] = {1, 2}
            super().step(*args)

    with (
        pytest.warns(RuntimeWarning, match="goes on without this checkpoint: The state can't be saved"),
        pytest.raises(ftcomm.ConfigError, match="extra history"),
    ):
        train(tmp_path, extra=extra, schedule=Later)
    assert not [*tmp_path.glob("*.pt")]


def test_what_is_put_into_extra_during_the_run_comes_back(tmp_path: Path) -> None:
    """An object has to be there when it loads its state."""

    def run(epochs: int, put: Any, extra: Any = None) -> Engine:
        net = nn.Linear(2, 1)
        engine = Engine(net, torch.optim.SGD(net.parameters(), 0.1), checkpoint_dir=tmp_path, extra=extra)
        for _, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(4, 2)), 2), epochs):
            with engine.step():
                net(x).sum().backward()
            engine.extra.update(put)
        return engine

    run(1, {"best": 0.5, "history": {"loss": [1.0, 2.0]}})
    assert run(1, {}).extra == {"best": 0.5, "history": {"loss": [1.0, 2.0]}}
    run(2, {"norm": nn.BatchNorm1d(2)})
    with pytest.raises(ftcomm.ConfigError, match=r"\(extra norm\).*put it there before"):
        run(3, {})
    assert run(3, {}, {"norm": nn.BatchNorm1d(2), "best": 0, "history": None}).extra["best"] == 0.5


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = folders.CheckpointFolder._write, []

    def full(self: Any, step: int, *more: Any) -> None:
        calls.append(step)
        if step in (3, 6, 18):
            raise ftcomm.SystemFailure(f"no space for {step}") from OSError(errno.ENOSPC, "No space left on device")
        write(self, step, *more)

    monkeypatch.setattr(folders.CheckpointFolder, "_write", full)
    with pytest.warns(RuntimeWarning, match="without the checkpoint before this one: no space for") as told:
        train(tmp_path)
    assert len(told) == 3
    assert [int(path.name.split("-")[1]) for path in sorted(tmp_path.glob("*.pt"))] == [12, 15, 20]


@pytest.mark.parametrize(
    ("at", "before", "told"),
    [
        (1, False, "after 2 steps, before its end, and no checkpoint was written then: there is none"),
        (6, False, "after 7 steps, before its end, and no checkpoint was written then: the newest is of step 6"),
        (5, False, "after 6 steps, before its end, and no checkpoint was written then: the newest is of step 3"),
        (6, True, ""),
    ],
)
def test_who_leaves_the_loop_is_told_what_no_checkpoint_has(tmp_path: Path, at: int, before: bool, told: str) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    engine = Engine(net, optimizer, checkpoint_dir=tmp_path, checkpoint_every=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(20, 2)), 2)):
            if before and step == at:
                break
            with engine.step():
                net(x).sum().backward()
                optimizer.step()
            if engine.committed and step == at:
                break
    texts = [str(one.message) for one in caught if "The loop was left" in str(one.message)]
    assert len(texts) == bool(told), texts
    assert told in "".join(texts)


def test_a_final_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, step: int, *more: Any) -> None:
        raise ftcomm.SystemFailure(f"no space for {step}")

    monkeypatch.setattr(folders.CheckpointFolder, "_write", full)
    with pytest.warns(RuntimeWarning), pytest.raises(ftcomm.SystemFailure, match="no space for 20"):
        train(tmp_path)


def test_a_folder_that_does_not_close_keeps_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is told, and SIGTERM is the process's own again."""
    close, uninstall, done = folders.CheckpointFolder.close, preempt.uninstall, []

    def closed(self: Any) -> None:
        close(self)
        raise ftcomm.SystemFailure("no space for 20")

    monkeypatch.setattr(folders.CheckpointFolder, "close", closed)
    monkeypatch.setattr(preempt, "uninstall", lambda: (done.append(1), uninstall()))
    with pytest.raises(ftcomm.SystemFailure, match="no space for 20"):
        train(tmp_path)
    assert done


def loop(body: Callable[[Any, Any, Any], None]) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    engine = Engine(net, optimizer)
    for _, (x,) in engine.steps(DataLoader(TensorDataset(torch.randn(6, 2)), 2)):
        body(engine, optimizer, lambda x=x: net(x).sum().backward())


def twice(engine: Any, optimizer: Any, backward: Any) -> None:
    with engine.step():
        backward()
        optimizer.step()
        optimizer.step()


def nested(engine: Any, optimizer: Any, backward: Any) -> None:
    with engine.step(), engine.step():
        pass


def again(engine: Any, optimizer: Any, backward: Any) -> None:
    for _ in range(2):
        with engine.step():
            pass


def closure(engine: Any, optimizer: Any, backward: Any) -> None:
    with engine.step():
        optimizer.step(backward)


def outside(engine: Any, optimizer: Any, backward: Any) -> None:
    optimizer.step()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (twice, "second update in one"),
        (nested, "inside another one"),
        (again, "Each batch of engine.steps"),
        (closure, "given a closure"),
        (outside, "outside of"),
        (lambda *_: None, "has to be inside"),
    ],
)
def test_misuse_is_refused(body: Any, text: str) -> None:
    with pytest.raises(ftcomm.ConfigError, match=text):
        loop(body)


def test_steps_only_once() -> None:
    _, engine = train()
    with pytest.raises(ftcomm.ConfigError, match="number of epochs"):
        next(engine.steps([1]))


def test_other_optimizers_are_refused() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ftcomm.ConfigError, match="one torch optimizer"):
        Engine(net, [torch.optim.SGD([p], 0.1) for p in net.parameters()])


def test_an_optimizer_in_extra_is_refused() -> None:
    """It would make its update also in a step that is dropped."""
    net = nn.Linear(2, 2)
    one, other = (torch.optim.SGD([parameter], 0.1) for parameter in net.parameters())
    with pytest.raises(ftcomm.ConfigError, match=r"extra\['other'\] is an optimizer.*a group for each"):
        Engine(net, one, extra={"note": 1, "other": other})


def scaled(folder: Path | None) -> tuple[Any, Any]:
    net, scale = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    return scale, lambda *parameters: Engine(
        net, torch.optim.SGD([*net.parameters(), *parameters], 0.1), checkpoint_dir=folder
    )


def test_parameters_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    """No checkpoint would have them."""
    scale, engine = scaled(tmp_path)
    with pytest.raises(
        ftcomm.ConfigError, match=r"parameter 2 \(shape \[1\]\) is not in the model.*a parameter of the"
    ):
        engine(scale)
    engine()
    scale, engine = scaled(None)
    engine(scale)  # nothing is saved


class Reducing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reducer = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.reducer(x)


def test_a_module_with_a_reducer_of_its_own(tmp_path: Path) -> None:
    """It is no DistributedDataParallel for that."""
    net = Reducing()
    Engine(net, torch.optim.SGD(net.parameters(), 0.1), checkpoint_dir=tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_optimizer_state_of_another_type_than_its_parameter(tmp_path: Path, kind: Any) -> None:
    def weights(folder: Path, end_at: int = -1) -> Any:
        torch.manual_seed(3)
        net = nn.Linear(8, 1, dtype=torch.float64)
        optimizer = kind(net.parameters())
        engine = Engine(net, optimizer, checkpoint_dir=folder, checkpoint_every=3)
        data = TensorDataset(torch.arange(STEPS * 4 * 8.0).reshape(-1, 8).sin())
        for step, (x,) in engine.steps(DataLoader(data, 4, shuffle=True)):
            if step == end_at:
                raise Ended
            with engine.step():
                net(x.double()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        kept = [value for values in optimizer.state.values() for value in values.values()]
        return net.weight.tolist(), [(value.dtype, value.tolist()) for value in kept]

    with pytest.raises(Ended):
        weights(tmp_path, 5)
    assert weights(tmp_path) == weights(tmp_path / "other")


@pytest.mark.parametrize("kept", [True, False])
def test_groups_that_the_script_keeps_stay_the_optimizers(tmp_path: Path, kept: bool) -> None:
    def weights(folder: Path, end_at: int = -1) -> Any:
        torch.manual_seed(3)
        net, rates = nn.Linear(8, 1), [torch.tensor(0.1) for _ in range(2)]
        shared = torch.tensor(0.1)
        groups = [
            {"params": [one], **({"lr": rate} if kept else {})}
            for one, rate in zip(net.parameters(), rates, strict=True)
        ]
        optimizer = torch.optim.Adam(groups, shared, foreach=False)
        engine = Engine(net, optimizer, checkpoint_dir=folder, checkpoint_every=3)
        data = TensorDataset(torch.arange(STEPS * 4 * 8.0).reshape(-1, 8).sin())
        for step, (x,) in engine.steps(DataLoader(data, 4)):
            if step == end_at:
                raise Ended
            for number, rate in enumerate(rates if kept else [shared]):
                rate.fill_(0.1 / (1 + step + number))
            with engine.step():
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return net.weight.tolist(), net.bias.tolist()

    with pytest.raises(Ended):
        weights(tmp_path, 5)
    assert weights(tmp_path) == weights(tmp_path / "other")


def test_a_checkpoint_goes_into_a_model_of_another_type(tmp_path: Path) -> None:
    """Then the optimizer's state follows its parameters, as with torch alone."""

    def steps(dtype: Any, epochs: int) -> Any:
        net = nn.Linear(8, 1, dtype=dtype)
        optimizer = torch.optim.Adam(net.parameters())
        engine = Engine(net, optimizer, checkpoint_dir=tmp_path)
        for _, (x,) in engine.steps(DataLoader(TensorDataset(torch.randn(8, 8)), 4), epochs):
            with engine.step():
                net(x.to(dtype)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return engine.step_number, optimizer.state[net.weight]["exp_avg"].dtype

    assert steps(torch.float32, 1) == (2, torch.float32)
    assert steps(torch.bfloat16, 2) == (4, torch.bfloat16)


def facts(**more: Any) -> Facts:
    return Facts(
        **{"world_size": 4, "policy": "lossy", "replicas": True, "replaced": True, "checkpoints": True, **more}
    )


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (facts(), "replication"),
        (facts(replaced=False), "rollback"),
        (facts(policy="raise"), "checkpoint"),
        (facts(policy="raise", checkpoints=False), "checkpoint"),
        (facts(world_size=1, policy=None), "checkpoint"),
        (facts(replicas=False, sharded=True, twins=True), "replication"),
        (facts(replicas=False, sharded=True, twins=True, replaced=False), "checkpoint"),
        (facts(replicas=False, sharded=True), "checkpoint"),
        (facts(replicas=False, sharded=True, checkpoints=False), "checkpoint"),
        (facts(world_size=1, policy=None, checkpoints=False), "checkpoint"),
        (facts(replaced=False, all_end=True), "replication"),
        (facts(replaced=False, all_end=True, checkpoints=False), "rollback"),
        (facts(replicas=False, sharded=True, twins=True, replaced=False, all_end=True), "replication"),
        (
            facts(replicas=False, sharded=True, twins=True, replaced=False, all_end=True, checkpoints=False),
            "checkpoint",
        ),
        (facts(replicas=False, sharded=True, replaced=False, all_end=True), "checkpoint"),
        (facts(policy="replay", replaced=False, all_end=True), "replay"),
        (facts(policy="replay", replaced=False, all_end=True, checkpoints=False), "replay"),
        (facts(policy="raise", replicas=False, stages=True), "checkpoint"),
        (facts(stages=True), "checkpoint"),  # replicas of stages
    ],
)
def test_auto(found: Facts, name: str) -> None:
    strategy, reason = choose(found)
    assert strategy.name == name
    assert reason
    assert not (found.all_end and "the launcher replaces" in reason)
    if not found.checkpoints:
        assert "there is no checkpoint_dir" in reason


ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "0", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, Launcher(ends_all=True)),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, Launcher(ends_all=True)),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"}, Launcher(ends_all=True)),
        ({"GROUP_WORLD_SIZE": "2"}, Launcher()),  # the other node's agent hears of nothing
        ({"FTCOMM_JOB": "of the user's"}, Launcher(ends_all=True)),
        ({"FTCOMM_INCARNATION": "0"}, Launcher()),
        ({"FTCOMM_INCARNATION": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}, Launcher(replaces=True)),
    ],
)
def test_launchers_are_told_apart(more: dict[str, str], found: Launcher) -> None:
    assert launcher({**ELASTIC, **more}) == found


def test_no_launcher() -> None:
    assert launcher({}) == launcher({"RANK": "0", "WORLD_SIZE": "4"}) == launcher({"PMIX_RANK": "0"}) == Launcher()


@pytest.mark.parametrize(
    ("wanted", "found", "text"),
    [
        ("replication", facts(policy="raise"), "--policy lossy"),
        ("checkpoint", facts(checkpoints=False), "checkpoint_dir"),
        ("lossy", facts(sharded=True, twins=True), "the model is sharded"),
        ("rollback", facts(sharded=True, twins=True), "the model is sharded"),
        ("replication", facts(sharded=True), "only copy of its shards"),
        ("luck", facts(), "none of auto, replication"),
        ("replay", facts(), "--policy replay"),
        ("parallel-replay", facts(), "--policy replay"),
        ("parallel-replay", facts(stages=True), "--policy replay"),
        ("replication", facts(stages=True), "stages of a pipeline"),
        ("checkpoint", facts(stages=True, checkpoints=False), "checkpoint_dir"),
    ],
)
def test_strategies_that_do_not_fit(wanted: str, found: Facts, text: str) -> None:
    with pytest.raises(ftcomm.ConfigError, match=text):
        choose(found, wanted)
