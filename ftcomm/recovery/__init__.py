"""Recovery of a training run: the engine, what it is made of, and the planning of recovery by logs.

>>> engine = ftcomm.recovery.Engine(model, optimizer, checkpoint_dir="ckpt")
>>> folder = ftcomm.recovery.CheckpointFolder("checkpoints", keep=3)
>>> undo = ftcomm.recovery.Undo(optimizer)

>>> grouping = ftcomm.recovery.plan_groups(seconds, sizes, log_limit=2 << 40, bandwidth=5e9, checkpoint_interval=500)
>>> ftcomm.recovery.seed_everything(7)

The first three need torch, which is imported with their first use. Only the engine talks to other ranks. Formulas and measured
figures are in ``docs/engine.md``, ``docs/undo.md`` and ``docs/planning.md``; what is in a checkpoint in
``docs/checkpoint-files.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "ftcomm.recovery.checkpoint_files": ("CheckpointFolder",),
    "ftcomm.recovery.determinism": ("RngState", "capture_rng", "deterministic", "restore_rng", "seed_everything"),
    "ftcomm.recovery.engine": ("Engine",),
    "ftcomm.recovery.grouping": ("Grouping", "exhaustive", "from_stages", "plan_groups"),
    "ftcomm.recovery.undo": ("Undo",),
    "ftcomm.recovery.worth": ("Worth", "activation_bytes", "bubble_ratio", "worth_logging"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]  # noqa: PLE0604 - names of the table above

if TYPE_CHECKING:
    from ftcomm.recovery.checkpoint_files import CheckpointFolder as CheckpointFolder
    from ftcomm.recovery.determinism import RngState as RngState
    from ftcomm.recovery.determinism import capture_rng as capture_rng
    from ftcomm.recovery.determinism import deterministic as deterministic
    from ftcomm.recovery.determinism import restore_rng as restore_rng
    from ftcomm.recovery.determinism import seed_everything as seed_everything
    from ftcomm.recovery.engine import Engine as Engine
    from ftcomm.recovery.grouping import Grouping as Grouping
    from ftcomm.recovery.grouping import exhaustive as exhaustive
    from ftcomm.recovery.grouping import from_stages as from_stages
    from ftcomm.recovery.grouping import plan_groups as plan_groups
    from ftcomm.recovery.undo import Undo as Undo
    from ftcomm.recovery.worth import Worth as Worth
    from ftcomm.recovery.worth import activation_bytes as activation_bytes
    from ftcomm.recovery.worth import bubble_ratio as bubble_ratio
    from ftcomm.recovery.worth import worth_logging as worth_logging


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
