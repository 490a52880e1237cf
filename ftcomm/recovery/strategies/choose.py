"""Which strategy: a pure decision, with its reason in words."""

from __future__ import annotations

from ftcomm.errors import ConfigError
from ftcomm.recovery.strategies.base import Facts, Strategy
from ftcomm.recovery.strategies.checkpoint import CHECKPOINT
from ftcomm.recovery.strategies.lossy import LOSSY
from ftcomm.recovery.strategies.parallel_replay import PARALLEL_REPLAY
from ftcomm.recovery.strategies.replay import REPLAY
from ftcomm.recovery.strategies.replication import REPLICATION
from ftcomm.recovery.strategies.rollback import ROLLBACK

__all__ = ["STRATEGIES", "choose"]

_ALL_END = "the launcher ends all when one dies (torchrun does; ftrun replaces the one)"
_LAST_WORDS = f"{_ALL_END}: they leave with a checkpoint of the last whole step"

STRATEGIES = {
    strategy.name: strategy for strategy in (REPLICATION, LOSSY, ROLLBACK, REPLAY, PARALLEL_REPLAY, CHECKPOINT)
}


def choose(facts: Facts, wanted: str = "auto") -> tuple[Strategy, str]:
    """The strategy and why.

    Raises:
        ConfigError: ``wanted`` is unknown, or can't be used with these facts; the message says what to do.
    """
    if wanted != "auto":
        if wanted not in STRATEGIES:
            raise ConfigError(f"strategy={wanted!r} is none of auto, {', '.join(STRATEGIES)}.")
        if why := STRATEGIES[wanted].misfit(facts):
            raise ConfigError(f"strategy={wanted!r}: {why}")
        return STRATEGIES[wanted], "it was asked for" + (
            _from_where(facts) if STRATEGIES[wanted].policy == "replay" else ""
        )
    if facts.world_size == 1:
        return CHECKPOINT, "there is one rank: nobody else holds the state" + _kept(facts)
    if facts.stages:
        newest = (
            "the newest checkpoint that all have"
            if facts.checkpoints
            else "the first step (there is no checkpoint_dir)"
        )
        return CHECKPOINT, (
            f"the stages of a pipeline all end when one dies, and the next start goes on from {newest} (ftrun --policy replay "
            "would replace the one)"
        )
    if facts.policy == "lossy" and facts.replicas:
        if facts.replaced:
            return REPLICATION, "every rank holds the whole state, and the launcher replaces who dies"
        if facts.all_end and facts.checkpoints:
            return REPLICATION, f"every rank holds the whole state, and {_LAST_WORDS}"
        if facts.all_end:
            return ROLLBACK, f"{_ALL_END}, and as there is no checkpoint_dir nothing is kept then"
        return ROLLBACK, "every rank holds the whole state, and nobody replaces who dies: survivors go on without it"
    if facts.policy == "lossy" and facts.sharded:
        if not facts.twins:
            return (
                CHECKPOINT,
                "each rank holds the only copy of its shards (a mesh of replicas and shards would make two)"
                + _kept(facts),
            )
        if facts.replaced:
            return REPLICATION, "another rank holds the same shards, and the launcher replaces who dies"
        if facts.all_end and facts.checkpoints:
            return REPLICATION, f"another rank holds the same shards, and {_LAST_WORDS}"
        return (
            CHECKPOINT,
            f"the model is sharded, and nobody replaces who dies (ftrun --max-restarts would){_kept(facts)}",
        )
    if facts.policy == "replay" and facts.all_end:
        goes_on = ": the next start goes on from the newest checkpoint" if facts.checkpoints else _kept(facts)
        return REPLAY, f"the policy is replay, but {_ALL_END}{goes_on}"
    if facts.policy == "replay":
        return (
            REPLAY,
            f"what ranks tell each other is logged: who dies is replaced and does its steps again{_from_where(facts)}",
        )
    return (
        CHECKPOINT,
        f"with policy {facts.policy!r} survivors can't go on; FTCOMM_POLICY=lossy would let them{_kept(facts)}",
    )


def _kept(facts: Facts) -> str:
    return "" if facts.checkpoints else "; as there is no checkpoint_dir, the next start begins with the first step"


def _from_where(facts: Facts) -> str:
    if facts.checkpoints and facts.replicas:
        return ", from the state of a living replica or from its newest checkpoint on"
    if facts.checkpoints:
        return ", from its newest checkpoint on"
    return ", from the first one on, and the log grows, as there is no checkpoint_dir"
