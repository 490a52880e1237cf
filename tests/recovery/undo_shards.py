"""One rank of a model that FSDP2 has sharded: its steps are undone, at last when the other rank is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from undo_cases import same

from ftcomm.errors import Unsupported
from ftcomm.recovery import Undo


def model(mesh: Any) -> Any:
    """Shards of unequal sizes, and none of the last layer's bias on the second rank."""
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    for layer in (made[0], made[2], made):
        fully_shard(layer, mesh=mesh)
    return made


def picture(optimizer: Any) -> Any:
    """Of the local shards: nothing is asked of the other rank."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [(local(p), {k: local(v) for k, v in optimizer.state.get(p, {}).items()}) for p in params]


def local(value: Any) -> Any:
    held = value.to_local() if hasattr(value, "to_local") else value
    return held.detach().clone() if isinstance(held, torch.Tensor) else held


def gradients(made: Any) -> None:
    made.zero_grad()
    made(torch.randn(4, 5) * 10).pow(2).sum().backward()


def check(context: harness.Context, made: Any, optimizer: Any, last: bool) -> None:
    try:
        Undo(optimizer, exact=False)
        raise AssertionError("plain undo of shards")
    except Unsupported as error:
        assert "copies the local shard" in str(error), error
    undo = Undo(optimizer)
    for number in range(2):
        gradients(made)
        before = picture(optimizer)
        optimizer.step()
        assert not same(before, picture(optimizer))
        if last and number == 1:
            context.mark("stepped")
            context.hold()  # until the other rank is dead
        size = sum(shard.numel() for shard, _ in before)
        assert undo.memory() >= 4 * size
        assert len(undo.updated) == 4
        undo.undo(undo.updated[:2])
        undo.undo()
        assert same(before, picture(optimizer))
        if not (last and number == 1):
            optimizer.step()
    undo.close()


def run(context: harness.Context, store: Path) -> str:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=context.rank, world_size=2)
    plain, hybrid = (
        init_device_mesh("cpu", (2,)),
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
    )
    for mesh, kind, more in (
        (hybrid, torch.optim.SGD, {"momentum": 0.9}),
        (hybrid, torch.optim.AdamW, {"foreach": True}),
        (plain, torch.optim.NAdam, {"foreach": False}),
        (plain, torch.optim.AdamW, {"fused": True}),
        (plain, torch.optim.RMSprop, {"foreach": True, "centered": True}),
    ):
        made = model(mesh)
        check(context, made, kind(made.parameters(), lr=0.1, **more), last="centered" in more)
    return "undone"
