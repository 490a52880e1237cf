"""The run's progress bar on a terminal, if tqdm is there."""

from __future__ import annotations

import sys
from typing import Any

from ftcomm.recovery.engine.progress import Progress

__all__ = ["Bar"]


class Bar:
    """Shows committed steps, how many are left, and what failures have cost so far.

    Args:
        wanted: None: if stderr is a terminal and tqdm is installed. True: in any case.

    Raises:
        ImportError: it is wanted, and tqdm is not installed.
    """

    def __init__(self, wanted: bool | None) -> None:
        self._bar: Any = None
        self._make: Any = None
        if wanted or (wanted is None and sys.stderr.isatty()):
            try:
                from tqdm import tqdm
            except ImportError as error:
                if wanted:
                    raise ImportError("bar=True needs tqdm: pip install tqdm.") from error
                return
            self._make = tqdm

    def show(self, progress: Progress, source: Any, epochs: int) -> None:
        """A step was committed. By one rank only: by the lowest that lives."""
        if self._make is None:
            return
        total = _total(progress, source, epochs)
        if self._bar is None:  # the lowest rank may have died, and this one goes on from its place
            self._bar = self._make(
                total=total, initial=progress.step - 1, unit="step", file=sys.stderr, dynamic_ncols=True
            )
        if total is not None:
            self._bar.total = total  # it changes with the number of ranks
        what = progress.words().partition(", ")[2]
        if what:
            self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(progress.step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
        self._bar = self._make = None


def _total(progress: Progress, source: Any, epochs: int) -> int | None:
    """Steps of the whole run, if the dataset tells its length and the ranks stay those that are there."""
    try:
        per_epoch: int = len(source)
    except TypeError:
        return None
    left: int = max(0, per_epoch - source.step) + max(0, epochs - 1 - source.epoch) * per_epoch
    return progress.step + left
