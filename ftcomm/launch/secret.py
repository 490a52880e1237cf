"""The job's secret, which the ranks of all nodes have to have."""

from __future__ import annotations

import os
import secrets

from ftcomm.errors import ConfigError
from ftcomm.launch.board import Board


def make_secret() -> str:
    """Or the one that was given."""
    return _given() or secrets.token_hex(32)


def write_secret(board: Board) -> None:
    """Who can reach the board can read it there; one that all nodes were given beforehand is not sent."""
    board.write("secret", "" if _given() else make_secret())


def check_secret(board: Board) -> str:
    """The run's. ConfigError: other nodes were given one and this one was not, or the other way round."""
    sent = board.wait_for("secret")
    if bool(_given()) != (sent == ""):
        raise ConfigError("FTCOMM_SECRET is set on some nodes only: set the same one on all of them, or on none.")
    return _given() or sent


def _given() -> str:
    return os.environ.get("FTCOMM_SECRET", "")
