"""Which slot takes which samples: pure arithmetic, the same on every rank that knows who is alive and who contributed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ftcomm.errors import ConfigError, InternalError
from ftcomm.recovery.data.ranges import Range, count, cut, deal, merged
from ftcomm.recovery.data.seeded import mixed
from ftcomm.recovery.data.source import of_another

__all__ = ["Shares"]


class Shares:
    """Deals each sample of an epoch to one slot, once.

    An epoch has regular steps and extra steps. In regular step t slot s has positions ``(t * slots + s) * batch_size`` and on of
    the epoch's order, whoever is alive, so that workers may load ahead. The last regular step may have fewer: they are shared
    out evenly over the slots. What a dead slot should have had goes to the others in the same step (``keep_batch``), or waits
    until the regular steps are over, like everything whose gradient did not get into a step. Extra steps take what waits.

    Args:
        samples: of the dataset.
        batch_size: samples of one slot in one step.
        slots: ranks of the job, dead ones too.
        shuffle: the epoch's order is drawn by lot from ``seed`` and the epoch; else it is the dataset's.
        seed: 0 to 2**63-1; the same on all ranks.
        drop_last: what does not fill a step of all slots at the epoch's end is not used in this epoch.
        keep_batch: each step but the last ones of an epoch has ``slots * batch_size`` samples, however few slots are alive. Else
            no slot ever has more than ``batch_size``.

    Attributes:
        epoch: counted from 0.
        step: of the epoch, the present one, which is not committed; counted from 0.
        steps: regular steps of an epoch.
    """

    def __init__(
        self, samples: int, batch_size: int, slots: int, *, shuffle: bool, seed: int, drop_last: bool, keep_batch: bool
    ) -> None:
        for name, value in (("samples", samples), ("batch_size", batch_size), ("slots", slots)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 on.")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
            raise ConfigError(f"seed={seed!r} must be a whole number from 0 to 2**63-1.")
        self.samples, self.batch_size, self.slots = samples, batch_size, slots
        self.shuffle, self.seed, self.drop_last, self.keep_batch = (
            bool(shuffle),
            seed,
            bool(drop_last),
            bool(keep_batch),
        )
        whole, rest = divmod(samples, batch_size * slots)
        self.steps = whole if drop_last or not rest else whole + 1
        if not self.steps:
            raise ConfigError(
                f"With drop_last=True the {samples} samples make no step: one takes {slots} slots x {batch_size} samples. "
                "Set drop_last=False or a smaller batch_size."
            )
        self.epoch = self.step = 0
        self._used = min(samples, self.steps * batch_size * slots)
        self._pending: list[Range] = []
        self._waiting = 0  # positions in _pending
        self._committed = 0
        self._order: Any = None
        self._order_epoch = -1

    @property
    def finished(self) -> bool:
        """Nothing of the epoch is left."""
        return self.step >= self.steps and not self._waiting

    @property
    def pending(self) -> int:
        """Samples that wait for an extra step."""
        return self._waiting

    def assign(self, alive: Sequence[int]) -> dict[int, list[int]]:
        """Of the present step, the dataset's indexes of each living slot. Some may have none at the end of an epoch."""
        return {slot: self.indexes(part) for slot, part in self.parts(alive).items()}

    def parts(self, alive: Sequence[int]) -> dict[int, list[Range]]:
        """As :meth:`assign`, in positions of the epoch's order: takes the time of the slots, not of the samples."""
        living = self._checked(alive)
        if self.finished:
            raise ConfigError(f"Epoch {self.epoch} is over: all its samples are used. Call next_epoch().")
        if self.step >= self.steps:
            size = self.batch_size * (self.slots if self.keep_batch else len(living))
            return deal(cut(self._pending, size)[0], dict.fromkeys(living, 0))
        own = {slot: self._slice(slot) for slot in range(self.slots)}
        parts = {slot: merged([own[slot]]) for slot in living}
        if self.keep_batch and len(living) < self.slots:
            orphans = merged(part for slot, part in own.items() if slot not in parts)
            for slot, more in deal(orphans, {slot: count(part) for slot, part in parts.items()}).items():
                parts[slot] += more
        return parts

    def indexes(self, part: Sequence[Range]) -> list[int]:
        """The dataset's indexes at these positions of the epoch's order."""
        order = self._order_now()
        if order is None:
            return [i for start, stop in part for i in range(start, stop)]
        return [i for start, stop in part for i in order[start:stop].tolist()]

    def commit(self, alive: Sequence[int], contributed: Collection[int]) -> None:
        """Ends the present step.

        Args:
            alive: as given to :meth:`assign` for it.
            contributed: the slots whose gradients are in it. What the others had waits for an extra step.
        """
        parts, contributed = self.parts(alive), set(contributed)
        if strangers := sorted(contributed - set(parts)):
            raise ConfigError(f"The slots {strangers} contributed to a step that only {sorted(parts)} had a share of.")
        lost = [one for slot, part in parts.items() if slot not in contributed for one in part]
        assigned = sum(map(count, parts.values()))
        self._committed += assigned - count(lost)
        if self.step >= self.steps:
            self._pending = merged([*lost, *cut(self._pending, assigned)[1]])
            self._waiting -= assigned
        else:
            if not self.keep_batch:
                lost += [self._slice(slot) for slot in range(self.slots) if slot not in parts]
            self._append(merged(lost))
        self._waiting += count(lost)
        self.step += 1
        self._check()

    def next_epoch(self) -> None:
        if not self.finished:
            raise ConfigError(
                f"Epoch {self.epoch} is not over: step {self.step} of {self.steps}, {self._waiting} samples wait for an extra "
                "one. Go on until there is no step left."
            )
        self.epoch += 1
        self.step = self._committed = 0

    def copy(self) -> Shares:
        """Another one that stands at the same step; they share the order, which nobody writes to."""
        other = object.__new__(Shares)
        other.__dict__.update(self.__dict__)
        other._pending = list(self._pending)
        return other

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists; the same on all ranks."""
        return {
            **self._setting(),
            "epoch": self.epoch,
            "step": self.step,
            "committed": self._committed,
            "pending": [list(one) for one in self._pending],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Raises ConfigError, and changes nothing, if the state is of other data; keep_batch may change."""
        for name, mine in self._setting().items():
            if name not in state:
                raise ConfigError(f"This is no state of a data source: it has no {name!r}.")
            if state[name] != mine:
                raise ConfigError(of_another(name, state[name], mine, "the samples that are used already"))
        before = dict(self.__dict__)
        try:
            self.epoch, self.step, self._committed = state["epoch"], state["step"], state["committed"]
            self._pending = [(start, stop) for start, stop in state["pending"]]
            self._waiting = count(self._pending)
            self._check()
            behind = min(self._used, self.step * self.batch_size * self.slots)
            places = [place for one in self._pending for place in one]
            if places != sorted(set(places)) or any(not 0 <= place <= behind for place in places):
                raise ValueError(f"{self._pending} cannot wait at step {self.step}.")
            if self.epoch < 0:
                raise ValueError(f"there is no epoch {self.epoch}.")
        except (KeyError, TypeError, ValueError, InternalError) as error:
            self.__dict__.update(before)
            raise ConfigError(f"This is no state of a data source: {error}") from error

    def _setting(self) -> dict[str, Any]:
        names = ("samples", "batch_size", "slots", "shuffle", "seed", "drop_last")
        return {name: getattr(self, name) for name in names}

    def _checked(self, alive: Sequence[int]) -> list[int]:
        living = sorted(set(alive))
        if not living or len(living) != len(alive) or living[0] < 0 or living[-1] >= self.slots:
            raise ConfigError(f"alive={list(alive)!r} must be one or more different slots of 0 to {self.slots - 1}.")
        return living

    def _slice(self, slot: int) -> Range:
        """Of the present regular step."""
        size = self.batch_size * self.slots
        start = self.step * size
        left = min(size, self._used - start)
        if left == size:
            return start + slot * self.batch_size, start + (slot + 1) * self.batch_size
        even, more = divmod(left, self.slots)
        start += slot * even + min(slot, more)
        return start, start + even + (slot < more)

    def _append(self, lost: list[Range]) -> None:
        """In a regular step nothing lies behind what is lost: the list need not be sorted, which takes long when it is."""
        if lost and self._pending and self._pending[-1][1] == lost[0][0]:
            lost[0] = (self._pending.pop()[0], lost[0][1])
        self._pending += lost

    def _check(self) -> None:
        """Each sample that is used in this epoch is committed, waits, or is yet to come."""
        to_come = max(0, self._used - self.step * self.batch_size * self.slots)
        if self._committed + self._waiting + to_come != self._used or min(self._committed, self._waiting) < 0:
            raise InternalError(
                f"At step {self.step} of epoch {self.epoch} {self._committed} samples are committed, {self._waiting} wait and "
                f"{to_come} are to come, which is not {self._used}."
            )

    def _order_now(self) -> Any:
        """The epoch's order as a tensor; None is the dataset's own."""
        if self.shuffle and self._order_epoch != self.epoch:
            generator = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
            self._order, self._order_epoch = torch.randperm(self.samples, generator=generator), self.epoch
        return self._order
