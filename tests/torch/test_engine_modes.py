"""What a script has switched in its model comes to a replacement, and back from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kept import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ftcomm.recovery

SWITCHES, DIES, STEPS = 3, 6, 10


def train(context: Any, what: str, dies: bool, folder: Path | None = None, until: int = STEPS) -> str:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    net[0].weight.requires_grad_(False)  # after it: its buckets have all
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(3 * 4 * STEPS, 6), torch.randn(3 * 4 * STEPS, 1))
    where = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 1}
    engine = ftcomm.recovery.Engine(model, optimizer, "replication", **where)
    for step, (x, y) in engine.steps(DataLoader(data, 4, shuffle=True), epochs=1):
        if dies and step == DIES and context.rank == 1 and context.incarnation == 0:
            context.die()
        with engine.step():
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if engine.committed and step + 1 == SWITCHES:
            if what == "batch norm":
                net[1].eval()
            elif what == "evaluation":
                model.eval()
            else:
                net[0].weight.requires_grad_(True)
        if step + 1 == until:
            break
    return digest(net, optimizer)


@pytest.mark.parametrize("what", ["batch norm", "evaluation", "a frozen parameter"])
def test_a_replacement_has_it(world: Any, what: str) -> None:
    (wanted,) = {*world(3, lambda context: train(context, what, dies=False), policy="lossy")}
    group = world.start(3, lambda context: train(context, what, dies=True), policy="lossy")
    group.wait_ended(1)
    world.replace(group, 1)
    found = [value for value in world.values(group, dies=(1,)) if value is not None]
    assert found == [wanted] * 3


def test_it_comes_back_from_a_checkpoint(world: Any, tmp_path: Path) -> None:
    (wanted,) = {*world(3, lambda context: train(context, "batch norm", dies=False), policy="lossy")}
    world(3, lambda context: train(context, "batch norm", False, tmp_path, until=DIES), policy="lossy")
    again = world(3, lambda context: train(context, "batch norm", False, tmp_path), policy="lossy")
    assert again == [wanted] * 3
