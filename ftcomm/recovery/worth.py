"""Is logging worth it for this job (SWIFT, section 5.4)? Decided from measured numbers, before the job starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftcomm.recovery._numbers import count, in_bytes, in_seconds, number

__all__ = ["Worth", "activation_bytes", "bubble_ratio", "worth_logging"]


@dataclass(frozen=True)
class Worth:
    """The answer of :func:`worth_logging` and the figures that decided; it is false like ``worth``.

    Attributes:
        worth: whether to log.
        reason: why, in words; every rule that speaks against it, with what would help.
        against: the names of those rules (see :func:`worth_logging`); empty: worth it.
        copy_seconds: per iteration, to copy the messages to host memory.
        bubble_seconds: per iteration, in which nothing else waits for that.
        log_to_model: log bytes per iteration over bytes of model state.
        interval_bytes: log bytes when the next checkpoint makes them garbage.
        writing_rate: bytes per second that the log is written with, on average.
        logged_recovery: expected seconds from the failure to where it was, with the log.
        plain_recovery: the same when all machines go back to the checkpoint.
    """

    worth: bool
    reason: str
    against: tuple[str, ...]
    copy_seconds: float
    bubble_seconds: float
    log_to_model: float
    interval_bytes: float
    writing_rate: float
    logged_recovery: float
    plain_recovery: float

    def __bool__(self) -> bool:
        return self.worth


def worth_logging(
    *,
    log_bytes: float,
    model_bytes: float,
    copy_bandwidth: float,
    bubble_seconds: float,
    iteration_seconds: float,
    checkpoint_interval: int,
    store_bandwidth: float,
    replay_seconds: float | None = None,
    replay_bytes: float | None = None,
    log_limit: float = math.inf,
    write_bandwidth: float = math.inf,
    model_factor: float = 10.0,
) -> Worth:
    """Whether a machine should log what it sends. All numbers are of one machine; ask for the one that logs most.

    Not worth it if one of these holds: copying the messages to host memory takes longer than the bubbles of an iteration
    (``"bubble"``); an iteration logs more than ``model_factor`` times the model state (``"model"``); the log of a checkpoint
    interval is larger than ``log_limit`` (``"storage"``); it grows faster than it can be written (``"writing"``); recovery with
    the log would not be faster than rolling everyone back (``"recovery"``).

    Args:
        log_bytes: sent to other groups per iteration.
        model_bytes: parameters and optimizer state.
        copy_bandwidth: from the device to host memory (PCIe), bytes per second.
        bubble_seconds: per iteration, that the device idles; :func:`bubble_ratio` times ``iteration_seconds`` if not measured.
        iteration_seconds: of the whole job.
        checkpoint_interval: iterations between two global checkpoints.
        store_bandwidth: from the global store to this machine, bytes per second.
        replay_seconds: per iteration, computing what was lost, e.g. ``Grouping.replay_seconds``; unless given, the iteration
            without its bubbles.
        replay_bytes: per iteration, logs of others that a replacement reads; ``log_bytes`` unless given.
        log_limit: bytes of storage for this machine's log.
        write_bandwidth: into that storage, bytes per second.
        model_factor: what "far larger than the model" means; SWIFT gives no number (its ViT-128/32 logged about twice its model).
    """
    log_bytes = number("log_bytes", log_bytes, "bytes", zero=True)
    replay_bytes = log_bytes if replay_bytes is None else number("replay_bytes", replay_bytes, "bytes", zero=True)
    model_bytes = number("model_bytes", model_bytes, "bytes")
    copy_bandwidth = number("copy_bandwidth", copy_bandwidth, "bytes per second", infinite=True)
    store_bandwidth = number("store_bandwidth", store_bandwidth, "bytes per second", infinite=True)
    write_bandwidth = number("write_bandwidth", write_bandwidth, "bytes per second", infinite=True)
    bubble_seconds = number("bubble_seconds", bubble_seconds, "seconds", zero=True)
    iteration_seconds = number("iteration_seconds", iteration_seconds, "seconds")
    checkpoint_interval = count("checkpoint_interval", checkpoint_interval, "iterations")
    log_limit = number("log_limit", log_limit, "bytes", zero=True, infinite=True)
    model_factor = number("model_factor", model_factor, "model sizes", infinite=True)
    if replay_seconds is None:
        replay_seconds = max(iteration_seconds - bubble_seconds, 0.0)
    else:
        replay_seconds = number("replay_seconds", replay_seconds, "seconds", zero=True)

    copy = log_bytes / copy_bandwidth
    ratio = log_bytes / model_bytes
    interval_bytes = log_bytes * checkpoint_interval
    rate = log_bytes / iteration_seconds
    lost, load = checkpoint_interval / 2, model_bytes / store_bandwidth
    download = replay_bytes / store_bandwidth
    logged = load + lost * max(replay_seconds, download)  # the files arrive while earlier ones are replayed
    plain = load + lost * iteration_seconds

    against: dict[str, str] = {}
    if copy > bubble_seconds:
        against["bubble"] = (
            f"copying {in_bytes(log_bytes)} to host memory takes {in_seconds(copy)} per iteration, but the bubbles have only "
            f"{in_seconds(bubble_seconds)}: log fewer boundaries (plan_groups)"
        )
    if ratio > model_factor:
        against["model"] = (
            f"an iteration logs {in_bytes(log_bytes)}, {ratio:.3g} times the model state of {in_bytes(model_bytes)} "
            f"(model_factor is {model_factor:g}): checkpoint more often instead"
        )
    if interval_bytes > log_limit:
        fitting = int(log_limit / log_bytes)
        against["storage"] = (
            f"the log takes {in_bytes(interval_bytes)} until the next checkpoint, more than log_limit={in_bytes(log_limit)}: "
            + (f"take a checkpoint every {fitting} iterations or " if fitting else "")
            + "log fewer boundaries (plan_groups)"
        )
    if rate > write_bandwidth:
        against["writing"] = (
            f"the log grows by {in_bytes(rate)} per second, its storage takes {in_bytes(write_bandwidth)}: "
            "use faster storage or log fewer boundaries (plan_groups)"
        )
    if logged >= plain:
        slow = "replaying an iteration" if replay_seconds >= download else "reading its log from the global store"
        against["recovery"] = (
            f"recovery with the log takes {in_seconds(logged)}, {in_seconds(plain)} without: {slow} takes "
            f"{in_seconds(max(replay_seconds, download))}, training it {in_seconds(iteration_seconds)}"
        )
    if against:
        reason = f"Not worth it: {'; '.join(against.values())}."
    else:
        reason = (
            f"Worth it: copying takes {in_seconds(copy)} of {in_seconds(bubble_seconds)} of bubbles per iteration, and recovery "
            f"{in_seconds(logged)} instead of {in_seconds(plain)}."
        )
    return Worth(
        worth=not against,
        reason=reason,
        against=tuple(against),
        copy_seconds=copy,
        bubble_seconds=bubble_seconds,
        log_to_model=ratio,
        interval_bytes=interval_bytes,
        writing_rate=rate,
        logged_recovery=logged,
        plain_recovery=plain,
    )


def activation_bytes(
    micro_batch_size: int, hidden_size: int, sequence_length: int, *, micro_batches: int = 1, element_bytes: int = 4
) -> int:
    """Bytes per iteration over one boundary of a transformer, activations and gradients together (SWIFT, section 5.4).

    A machine sends about half of it at each of its two boundaries.
    """
    given = {
        "micro_batch_size": micro_batch_size,
        "hidden_size": hidden_size,
        "sequence_length": sequence_length,
        "micro_batches": micro_batches,
        "element_bytes": element_bytes,
    }
    product = 2
    for name, value in given.items():
        product *= count(name, value, name.replace("_", " "))
    return product


def bubble_ratio(stages: int, micro_batches: int) -> float:
    """The share of an iteration in which a stage of GPipe or 1F1B idles: (p-1)/(m+p-1) (SWIFT, section 2.1)."""
    stages = count("stages", stages, "stages")
    micro_batches = count("micro_batches", micro_batches, "micro-batches")
    return (stages - 1) / (micro_batches + stages - 1)
