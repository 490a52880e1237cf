"""The exception tree: everything that ftcomm raises is a subclass of :class:`Error`.

Each exception's text is a full sentence that says what happened and what to do; its fields say the same to a program.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = [
    "Cancelled",
    "Closed",
    "ConfigError",
    "Error",
    "InternalError",
    "Interrupted",
    "LogCorrupt",
    "LogFull",
    "Mismatch",
    "NoAuthority",
    "PeerFailure",
    "ReplayDiverged",
    "Revoked",
    "StaleEpoch",
    "SystemFailure",
    "Timeout",
    "Truncated",
    "Unsupported",
    "from_json",
]


class Error(Exception):
    """Base of all ftcomm exceptions.

    Attributes:
        message: the full sentence, also ``str(error)``.
        operation: which operation, e.g. ``"all_reduce #12 of communicator world"``; empty when none was concerned.
        ranks: the communicator ranks concerned (the dead, the missing, the disagreeing); may be empty.
        evidence: how each of ``ranks`` was noticed (``"robust-futex"``, ``"pidfd"``, ``"heartbeat"``, ...); may be empty.
        epoch: the job's epoch at the decision.
        value: for ``agree``, the flag that was agreed although this error is reported; else None.
    """

    def __init__(
        self,
        message: str = "",
        *,
        ranks: Sequence[int] = (),
        evidence: Sequence[str] = (),
        operation: str = "",
        epoch: int = 0,
        value: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.ranks = tuple(ranks)
        self.evidence = tuple(evidence)
        self.operation = operation
        self.epoch = epoch
        self.value = value

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that never came; the same as ``ranks`` (named so for :class:`Timeout`)."""
        return self.ranks

    def fields(self) -> dict[str, Any]:
        """Everything but the class, as a JSON-able dict."""
        return {
            "message": self.message,
            "ranks": list(self.ranks),
            "evidence": list(self.evidence),
            "operation": self.operation,
            "epoch": self.epoch,
            "value": self.value,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.fields()))


def _rebuild(cls: type[Error], fields: dict[str, Any]) -> Error:
    message = fields.pop("message")
    return cls(message, **fields)


class PeerFailure(Error):
    """Members of the communicator died: ``ranks`` says which, ``evidence`` how each was noticed.

    Raised on every rank of the communicator. Go on with ``comm.agree`` and ``comm.shrink()``.
    """


class Revoked(Error):
    """The communicator was revoked. Only ``agree`` and ``shrink`` still work on it."""


class StaleEpoch(Error):
    """This rank was voted out of the job (it was silent for too long, or cut off). It can only exit and be replaced."""


class NoAuthority(Error):
    """The store or segment that holds the membership decisions is lost: nothing can be decided safely any more."""


class Timeout(Error, TimeoutError):
    """A rank that is alive never entered the operation; ``missing`` names the ranks."""


class ConfigError(Error, ValueError):
    """A wrong argument, option or environment variable. Nothing was sent to other ranks."""


class Mismatch(ConfigError):
    """Ranks called different operations at the same point; ``ranks`` are those who differ from the lowest rank."""


class Unsupported(ConfigError):
    """This version, machine or combination of types cannot do it."""


class Closed(Error):
    """The communicator or its job was closed (or belongs to the parent of a forked process)."""


class Interrupted(Error):
    """A signal ended the wait (on this rank or on the one that proposed the operation's failure)."""


class Cancelled(Error):
    """The operation was given up (cancel, or Ctrl-C) by the rank in ``ranks``."""


class Truncated(Error):
    """An incoming message is larger than the receive buffer."""


class SystemFailure(Error):
    """The operating system refused something; the message says what."""


class LogFull(Error):
    """The pair log reached its limit."""


class LogCorrupt(Error):
    """A record of the pair log failed its check."""


class ReplayDiverged(Error):
    """A replayed execution did not do what the log says it did."""


class InternalError(Error):
    """A bug in ftcomm. Please report it with the message."""


_BY_CODE: dict[int, type[Error]] = {
    1: PeerFailure,
    2: Revoked,
    3: StaleEpoch,
    4: NoAuthority,
    5: Timeout,
    6: Mismatch,
    7: ConfigError,
    8: Interrupted,
    9: Closed,
    10: SystemFailure,
    11: Unsupported,
    12: Truncated,
    13: Cancelled,
    14: InternalError,
    15: LogFull,
    16: LogCorrupt,
    17: ReplayDiverged,
}


def from_json(code: int, detail: str) -> Error:
    """Builds the exception for an ``FT_*`` code from the JSON of ``ft_last_error()``."""
    cls = _BY_CODE.get(code, InternalError)
    try:
        parsed = json.loads(detail) if detail else {}
    except ValueError:
        parsed = {"message": detail}
    return cls(
        parsed.get("message") or f"ftcomm failed with code {code} and left no message.",
        ranks=parsed.get("ranks") or (),
        evidence=parsed.get("evidence") or (),
        operation=parsed.get("operation") or "",
        epoch=parsed.get("epoch") or 0,
    )
