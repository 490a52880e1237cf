"""Options of a job and its communicators, and their environment variables."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ftcomm.errors import ConfigError

__all__ = ["Options", "environment_name"]

POLICIES = ("raise", "lossy", "replay")  # each at its number in ftcomm.h
TRANSPORTS = ("auto", "shm", "tcp")
DURABILITIES = ("process", "host")
LOG_MODES = ("sync", "async")
DEFAULT_TIMEOUT = 1800.0
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(|k|m|g|t)(i?b)?\s*$", re.IGNORECASE)


def environment_name(name: str) -> str:
    """``heartbeat`` -> ``FTCOMM_HEARTBEAT``."""
    return "FTCOMM_" + name.upper()


def _option(name: str, default: Any, meaning: str, parse: Callable[[str], Any] = str) -> Any:
    """A field whose default is its environment variable, read when an Options is made."""

    def value() -> Any:
        text = os.environ.get(environment_name(name))
        if text is None or text == "":
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ConfigError(f"{environment_name(name)}={text!r} is not valid: {error}.") from None

    return field(default_factory=value, metadata={"meaning": meaning, "default": default})


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("give a number of seconds, for example 1.5") from None


def parse_size(text: str) -> int:
    """Bytes: ``65536``, ``64k``, ``64KiB``; ValueError says what is allowed."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError("give a number of bytes, for example 4294967296 or 4GiB")
    return int(float(match.group(1)) * 1024 ** " kmgt".index(match.group(2).lower() or " "))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a job may be told; see ``docs/operations.md`` for the table.

    Every field has an environment variable ``FTCOMM_<NAME>``; an argument given here wins over it.
    """

    policy: str = _option("policy", "raise", "what a death does to a pending operation: raise, lossy, replay")
    heartbeat: float = _option(
        "heartbeat",
        1.0,
        "seconds of silence before a rank is suspected; the protocol's own pauses and waits follow from it (not timeout)",
        _seconds,
    )
    timeout: float | None = _option(
        "timeout",
        None,
        "seconds for an operation that a live rank never enters; then the communicator is revoked (None: 1800). With torch: "
        "pg_options=Options(timeout=) wins, then a timeout= of init_process_group or new_group other than torch's 30 minutes, "
        "then this; the start of the job takes torch's only",
        _seconds,
    )
    transport: str = _option(
        "transport", "auto", "auto, shm (ranks of one host), tcp (for data; ranks of one host still see each other die)"
    )
    interface: str | None = _option("interface", None, "network interface or address to bind (None: found)")
    host: str | None = _option("host", None, "host identity: ranks with the same one share memory (None: found)")
    authority: str = _option(
        "authority", "auto", "who decides membership: auto (shm on one host, else store), shm, store"
    )
    secret: str | None = _option(
        "secret", None, "per-job secret; without one only loopback and shared memory are accepted"
    )
    log: str | Sequence[Sequence[int]] = _option(
        "log",
        "all",
        "policy replay: which messages are logged: all, inter-host (between hosts), or between groups, as in 0,1/2,3; a group "
        "starts again as a whole",
    )
    log_dir: str | None = _option("log_dir", None, "policy replay: folder of the pair log (None: tmpfs)")
    log_limit: int = _option("log_limit", 4 << 30, "bytes of memory that the pair log of a rank may take", parse_size)
    log_spill: str | None = _option(
        "log_spill", None, "folder on disk for what is above log_limit (None: LogFull is raised then)"
    )
    log_mode: str = _option(
        "log_mode",
        "sync",
        "policy replay: when a message to another host is logged: sync (before send returns), async (in the background; at "
        "the latest at a checkpoint)",
    )
    durability: str = _option("durability", "process", "what a logged message survives: process, host")
    events: str | None = _option("events", None, "folder for events-RANK-INCARNATION.jsonl (None: no file)")

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, POLICIES)
        _one_of("transport", self.transport, TRANSPORTS)
        _one_of("durability", self.durability, DURABILITIES)
        _one_of("log_mode", self.log_mode, LOG_MODES)
        _positive("heartbeat", self.heartbeat, least=0.01)
        if self.timeout is not None:
            _positive("timeout", self.timeout)
            if self.timeout < self.heartbeat:
                raise ConfigError(
                    f"timeout={self.timeout:g} s is shorter than heartbeat={self.heartbeat:g} s: a live rank would be "
                    "given up before a dead one is noticed. Raise the timeout or lower the heartbeat."
                )
        if self.authority.startswith("etcd://"):
            raise ConfigError(
                f"authority={self.authority!r}: etcd is not built in. Use etcd as torch's rendezvous store and "
                "authority='store'."
            )
        _one_of("authority", self.authority, ("auto", "shm", "store"))
        object.__setattr__(self, "log", _log(self.log))
        if self.log != "all" and self.policy != "replay":
            raise ConfigError(
                f"log={self.log!r} says what policy 'replay' logs, and policy={self.policy!r} logs nothing: leave it out, or "
                "use policy='replay'."
            )
        if self.secret is not None and len(self.secret) < 16:
            raise ConfigError(
                f"The secret has {len(self.secret)} characters; give at least 16, for example from "
                "`python -c 'import secrets; print(secrets.token_hex(32))'`."
            )
        if self.log_limit <= 0:
            raise ConfigError(f"log_limit={self.log_limit} must be a positive number of bytes.")

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{f.name}={'<hidden>' if f.name == 'secret' and self.secret else repr(getattr(self, f.name))}"
            for f in fields(self)
        )
        return f"Options({shown})"

    @property
    def log_scope(self) -> str:
        """``log`` as text: ``all``, ``inter-host``, or groups as in ``0,1/2,3``."""
        return self.log if isinstance(self.log, str) else "/".join(",".join(map(str, group)) for group in self.log)

    @property
    def operation_timeout(self) -> float:
        """``timeout``, or its default of 30 minutes."""
        return DEFAULT_TIMEOUT if self.timeout is None else self.timeout


def _log(value: object) -> str | tuple[tuple[int, ...], ...]:
    """``all``, ``inter-host``, or groups: lists of ranks, or text as in ``0,1/2,3`` or ``[[0, 1], [2, 3]]``."""
    if value in ("all", "inter-host"):
        return str(value)
    wrong = ConfigError(
        f"log={value!r} is neither all, nor inter-host, nor groups of ranks, as in [[0, 1], [2, 3]] or 0,1/2,3 (argument "
        "log= or FTCOMM_LOG)."
    )
    groups: Any = value
    if isinstance(value, str):
        try:
            groups = json.loads(value) if value.startswith("[") else [part.split(",") for part in value.split("/")]
            groups = [[int(rank) for rank in group] for group in groups]
        except (TypeError, ValueError):
            raise wrong from None
    if not isinstance(groups, Sequence) or not all(isinstance(group, Sequence) for group in groups):
        raise wrong
    ranks = [rank for group in groups for rank in group]
    if not ranks or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks):
        raise wrong
    if len(set(ranks)) != len(ranks):
        raise ConfigError(f"log={value!r}: a rank is in two groups, or twice in one.")
    return tuple(tuple(group) for group in groups if group)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r} is not one of {', '.join(allowed)} (argument {name}= or {environment_name(name)})."
        )


def _positive(name: str, value: object, least: float = 0.0) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < least or value <= 0:  # type: ignore[operator]
        bound = f"at least {least:g}" if least else "positive"
        raise ConfigError(
            f"{name}={value!r} must be a number of seconds, {bound} (argument {name}= or {environment_name(name)})."
        )
