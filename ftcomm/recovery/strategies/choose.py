"""Which strategy: a pure decision, with its reason in words."""

from __future__ import annotations

from ftcomm.errors import ConfigError, Unsupported
from ftcomm.recovery.strategies.base import Facts, Strategy
from ftcomm.recovery.strategies.checkpoint import CHECKPOINT
from ftcomm.recovery.strategies.lossy import LOSSY
from ftcomm.recovery.strategies.replication import REPLICATION
from ftcomm.recovery.strategies.rollback import ROLLBACK

__all__ = ["STRATEGIES", "choose"]

STRATEGIES = {strategy.name: strategy for strategy in (REPLICATION, LOSSY, ROLLBACK, CHECKPOINT)}
_ELSEWHERE = ("replay", "parallel-replay")  # of pipelines: the communication layer's policy, without an engine


def choose(facts: Facts, wanted: str = "auto") -> tuple[Strategy, str]:
    """The strategy and why.

    Raises:
        ConfigError: ``wanted`` is unknown, or can't be used with these facts; the message says what to do.
        Unsupported: it is one that the engine does not carry out.
    """
    if wanted in _ELSEWHERE:
        raise Unsupported(
            f"strategy={wanted!r} is not carried out by the engine. A pipeline is replayed by the communication layer: start it "
            "with ftrun --policy replay (docs/pipelines.md)."
        )
    if wanted != "auto":
        if wanted not in STRATEGIES:
            raise ConfigError(f"strategy={wanted!r} is none of auto, {', '.join(STRATEGIES)}.")
        if why := STRATEGIES[wanted].misfit(facts):
            raise ConfigError(f"strategy={wanted!r}: {why}")
        return STRATEGIES[wanted], "it was asked for"
    if facts.world_size == 1:
        return CHECKPOINT, "there is one rank: nobody else holds the state"
    if facts.policy == "lossy" and facts.replicas:
        if facts.replaced:
            return REPLICATION, "every rank holds the whole state, and the launcher replaces who dies"
        return ROLLBACK, "every rank holds the whole state, and nobody replaces who dies: survivors go on without it"
    return CHECKPOINT, f"with policy {facts.policy!r} survivors can't go on; ftrun --policy lossy would let them"
