"""Sharded parameters (FSDP2): what a rank holds of them, and which ranks hold the same."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ftcomm.errors import ConfigError

__all__ = ["Part", "Shards", "is_sharded", "local", "reshard", "sharded"]


def is_sharded(value: Any) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes longer than many a recovery
    return module is not None and isinstance(value, module.DTensor)


def reshard(module: Any) -> None:
    """FSDP2 shows whole parameters between a forward and a backward pass, of its root also after an evaluation."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for part in module.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def sharded(module: Any) -> bool:
    """Whether a parameter of the module is a DTensor."""
    reshard(module)
    return any(is_sharded(parameter) for parameter in module.parameters())


def local(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds, in the same memory; of an ordinary tensor all of it."""
    with torch.no_grad():
        held: Any = value
        return (held.to_local() if is_sharded(value) else held).detach()


@dataclass(frozen=True)
class Part:
    """Of which DTensor a local tensor is a part, so that another rank's can be made of it.

    Attributes:
        mesh: its number among those of the parameters.
        placements, shape, stride: the DTensor's.
    """

    mesh: int
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Shards:
    """How a module's parameters are spread over the ranks of a job.

    Args:
        module: with DTensors among its parameters, over the default group's ranks.
        world_size: of the job.

    Attributes:
        world_size: of the job.

    Raises:
        ConfigError: a parameter is sharded in more than one way at once, or not over all ranks.
    """

    def __init__(self, module: Any, world_size: int) -> None:
        self.world_size = world_size
        self._meshes: list[Any] = []
        where: dict[Any, None] = {}  # an ordered set of (mesh, dimension that shards)
        for name, parameter in module.named_parameters():
            if is_sharded(parameter):
                where[self._mesh_of(parameter), _dimension(name, parameter)] = None
        self._keys = [
            tuple(self._coordinate(mesh, dimension, rank) for mesh, dimension in where) for rank in range(world_size)
        ]

    def _mesh_of(self, value: Any) -> int:
        for number, mesh in enumerate(self._meshes):
            if mesh is value.device_mesh or mesh == value.device_mesh:
                return number
        self._meshes.append(value.device_mesh)
        return len(self._meshes) - 1

    def _coordinate(self, mesh: int, dimension: int | None, rank: int) -> int:
        found = (self._meshes[mesh].mesh == rank).nonzero().tolist()
        if len(found) != 1:
            raise ConfigError(
                f"Rank {rank} is not in the mesh that a parameter is sharded over. Shard the model over all ranks of the job: "
                "fully_shard(model, mesh=init_device_mesh(device, (replicas, shards), mesh_dim_names=...))."
            )
        return 0 if dimension is None else int(found[0][dimension])

    def twins(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same shards as this one, itself among them."""
        return tuple(other for other, key in enumerate(self._keys) if key == self._keys[rank])

    @property
    def replicated(self) -> bool:
        """Whether each rank has a twin."""
        return all(len(self.twins(rank)) > 1 for rank in range(self.world_size))

    def part(self, value: Any) -> Part:
        """Of a DTensor over a mesh of the parameters."""
        for number, mesh in enumerate(self._meshes):
            if mesh is value.device_mesh or mesh == value.device_mesh:
                return Part(number, tuple(value.placements), tuple(value.shape), tuple(value.stride()))
        raise ConfigError("Part of the training's state is sharded over another mesh than the parameters.")

    def whole(self, part: Part, held: torch.Tensor) -> Any:
        """The DTensor of which this rank holds ``held``. Does not communicate."""
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            return DTensor.from_local(
                held,
                self._meshes[part.mesh],
                part.placements,
                run_check=False,
                shape=torch.Size(part.shape),
                stride=part.stride,
            )

    def piece(self, part: Part, rank: int) -> tuple[int, int, int]:
        """(dimension, offset, length) of what a rank holds: as torch.chunk cuts it, so the last ones may have less, or none."""
        for dimension, placement in enumerate(part.placements):
            if placement.is_shard():
                size, pieces = part.shape[placement.dim], self._meshes[part.mesh].size(dimension)
                each = -(-size // pieces)
                offset = min(size, each * self._coordinate(part.mesh, dimension, rank))
                return placement.dim, offset, min(each, size - offset)
        return 0, 0, part.shape[0]


def _dimension(name: str, parameter: Any) -> int | None:
    """The dimension of the mesh that shards it; None: it is whole on each rank."""
    found: Iterable[tuple[int, Any]] = [
        (number, placement) for number, placement in enumerate(parameter.placements) if not placement.is_replicate()
    ]
    if not found:
        return None
    (dimension, placement), *more = found
    if more or type(placement).__name__ != "Shard":
        raise ConfigError(
            f"Parameter {name!r} is sharded in more than one way ({', '.join(map(str, parameter.placements))}): tensor "
            "parallelism together with FSDP2 can't be carried over failures yet."
        )
    return dimension
