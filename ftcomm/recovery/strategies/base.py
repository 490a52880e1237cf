"""What a strategy decides, and what it is chosen by."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Facts", "Strategy"]


@dataclass(frozen=True)
class Facts:
    """What is known at the start, the same on all ranks.

    Attributes:
        world_size: ranks of the job.
        policy: of the model's process group: raise, lossy or replay; None without a process group.
        replicas: every rank holds the whole model (DistributedDataParallel).
        replaced: the launcher starts another process for one that died, and the others go on.
        all_end: the launcher ends all others when one has died, and maybe starts all again (torchrun).
        checkpoints: there is a folder for them.
        sharded: each rank holds a part of the model (FSDP2).
        twins: and another rank holds the same part (HSDP).
        stages: each rank holds a stage of a pipeline, or one of its replicas, and messages are not logged.
    """

    world_size: int
    policy: str | None
    replicas: bool
    replaced: bool
    checkpoints: bool
    sharded: bool = False
    twins: bool = False
    all_end: bool = False
    stages: bool = False


@dataclass(frozen=True)
class Strategy:
    """What survivors do when a rank has died. Decisions only; the engine carries them out.

    Attributes:
        name: as in ``Engine(strategy=...)``.
        policy: what the group needs to have; None: any.
        drops: a step to which a rank did not contribute is not committed: nothing of it stays, and it is done again.
        waits: no step begins before each dead rank has a replacement.
        shards: it is for sharded models as well.
        ends: all end, whatever the policy would allow.
    """

    name: str
    policy: str | None
    drops: bool
    waits: bool
    shards: bool = False
    ends: bool = False

    def misfit(self, facts: Facts) -> str | None:
        """Why it can't be used here and what to do, or None."""
        if facts.stages:
            return (
                f"the ranks hold the stages of a pipeline, and with policy {facts.policy!r} nobody can take a dead one's place. "
                "Use checkpoint, or start with ftrun --policy replay."
            )
        if facts.sharded and not self.shards:
            return (
                "the model is sharded, and without a rank's shards the others can't go on. Use replication (fully_shard "
                "over a mesh of replicas and shards) or checkpoint."
            )
        if facts.sharded and not facts.twins:
            return (
                "each rank holds the only copy of its shards, so a replacement can't get them. Give fully_shard() a mesh of "
                "replicas and shards (docs/engine.md), or use checkpoint."
            )
        if self.policy is not None and facts.world_size > 1 and facts.policy != self.policy:
            return (
                f"it needs a process group with policy {self.policy!r}, and this one has {facts.policy!r}. "
                f"Start with ftrun --policy {self.policy}, or pg_options=ftcomm.Options(policy={self.policy!r})."
            )
        return None
