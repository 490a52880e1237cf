"""A Keeper whose ranks run inside ``init_process_group("ftcomm")``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from harness import Context, Group, Ranks
from keeper import Keeper, tell_of_admission

import ftcomm.torch
from ftcomm.torch import groups

Program = Callable[[Context], Any]
Keep = Callable[..., "TorchKeeper"]


class TorchKeeper(Keeper):
    """One job of ``size`` torch ranks that survives everything; ``store``: the address of a torch TCPStore.

    With ``backend="gloo"`` it only gives a reference, and survives nothing.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: tuple[str, int],
        size: int,
        program: Program,
        backend: str = "ftcomm",
        **options: Any,
    ):
        self._store, self._backend = store, backend
        options.setdefault("heartbeat", 3.0)  # a busy machine is no reason to take somebody for dead
        super().__init__(ranks, size, lambda _, context: program(context), direct=False, **options)

    def _run(self, group: Group, context: Context) -> Any:
        os.environ.update(FTCOMM_JOB=group.job, FTCOMM_INCARNATION=str(context.incarnation))
        torch.set_num_threads(1)
        ftcomm.torch.register_backend()
        store = dist.TCPStore(*self._store, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(group.job, store),
            rank=context.rank,
            world_size=group.size,
            pg_options=group.options_of(context.rank) if self._backend == "ftcomm" else None,
            # Of the start, which a busy machine may delay; operations have that of the options.
            timeout=timedelta(seconds=max(60.0, group.options.operation_timeout)),
        )
        if self._backend == "ftcomm":
            tell_of_admission(groups.job_of(groups.backend_of()), context)
        value = self._program(None, context)
        dist.destroy_process_group()
        return value


def kept(ranks: Ranks, store: tuple[str, int], usual_size: int) -> Iterator[Keep]:
    """For a fixture: makes a TorchKeeper; what is left of it goes after the test."""
    made: list[TorchKeeper] = []

    def make(program: Any, size: int = usual_size, **options: Any) -> TorchKeeper:
        made.append(TorchKeeper(ranks, store, size, program, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
