"""Ranks with an initialized process group: the fixture ``world``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness
import pytest

pytest.importorskip("torch")

# What torch itself would import later, in each child anew.
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.parallel
import torch_store as torch_store_process
from devices import DEVICES

import ftcomm.stores.torch_store
import ftcomm.torch
from ftcomm.torch import _extension, groups  # noqa: F401

_extension.load()  # children would otherwise, one by one


@pytest.fixture(scope="session")
def torch_store() -> Iterator[tuple[str, int]]:
    yield from torch_store_process.serve()


class World:
    """``world(4, fn)`` runs ``fn(context)`` on 4 ranks inside ``init_process_group("ftcomm")`` and returns the values."""

    def __init__(self, ranks: harness.Ranks, store: tuple[str, int]) -> None:
        self._ranks, self._store = ranks, store

    def __call__(self, size: int, fn: Callable[[Any], Any], *, dies: tuple[int, ...] = (), **how: Any) -> list[Any]:
        return self._ranks.values(self.start(size, fn, **how), dies)

    def start(
        self,
        size: int,
        fn: Callable[[Any], Any],
        *,
        backend: str = "ftcomm",
        faults: str = "",
        store: Callable[[], Any] | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> Any:
        """Starts the ranks and returns the harness's Group; ``replace(group, rank)`` adds a replacement.

        ``device``: where tensors are made that do not say where. Of CUDA all ranks use the first.
        """
        options.setdefault("heartbeat", 3.0)  # a busy machine is no reason to vote anybody out
        group = self._ranks.start(size, None, direct=False, **options)
        address = self._store

        def run(group: Any, context: Any) -> Any:
            os.environ.update(FTCOMM_JOB=group.job, FTCOMM_INCARNATION=str(context.incarnation))
            if faults:
                os.environ["FTCOMM_FAULTS"] = faults
            torch.set_num_threads(1)
            ftcomm.torch.register_backend()
            made = store() if store else dist.TCPStore(*address, is_master=False, wait_for_workers=False)
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(group.job, made),
                rank=context.rank,
                world_size=group.size,
                pg_options=group.options,
                # Of the start, which a busy machine may delay; operations have that of the options.
                timeout=timedelta(seconds=max(60.0, group.options.operation_timeout)),
            )
            with torch.device(device) if device != "cpu" else contextlib.nullcontext():
                value = fn(context)
            dist.destroy_process_group()
            return value

        group.run = run
        for rank in range(size):
            group.spawn(rank, run)
        return group

    @staticmethod
    def replace(group: Any, rank: int, incarnation: int = 1) -> None:
        group.spawn(rank, group.run, incarnation)

    def values(self, group: Any, dies: tuple[int, ...] = ()) -> list[Any]:
        return self._ranks.values(group, dies)


@pytest.fixture
def world(ranks: harness.Ranks, torch_store: tuple[str, int]) -> World:
    return World(ranks, torch_store)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """For World's ``device``: also a GPU, where there is one."""
    return str(request.param)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """A folder for Options(events=...)."""
    return tmp_path / "events"
