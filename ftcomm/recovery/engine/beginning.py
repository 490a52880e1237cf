"""The state of a step's begin: a tag that ranks with another one do not have, and whether the state is still there.

What is no tensor, or small, is copied at the begin. Of the model and the optimizer the tag has a sample: sizes, and a cache line
at either end of each tensor. So replicas that only seem to be equal (each with a share of the optimizer's state, averaged now and
then) have other tags. Buffers, and tensors in schedulers and extra, are in it with their whole content.

Later the tag is made again, and the version counters are looked at: the script, or a forward pass, may have changed something.
What neither shows: a parameter that is written to through ``.data`` before the update, but not at its ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ftcomm.errors import Unsupported
from ftcomm.recovery.engine.message import Packed, pack, unpack
from ftcomm.recovery.engine.restorable import copied
from ftcomm.recovery.engine.saved import RunState
from ftcomm.torch.blocks import checksum, digest, sample

__all__ = ["Beginning"]

COPIED = 1 << 20  # bytes

Versions = list[tuple[int, int]]


class _Taken(NamedTuple):
    tag: str
    small: Packed
    versions: Versions


class _Watched:
    """Tensors of the model and the optimizer. To find them takes longer than to look at them."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        held: list[Any] = []
        self._has_plain = any(value is not None for value in _plain(list(optimizer.state.values()), held))
        self._optimizer = optimizer
        self.buffers = list(module.buffers())
        self.tensors = [*module.parameters(), *self.buffers, *held]
        if any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in self.tensors):
            raise Unsupported("the model is not in memory of the CPU, or not all of it is dense")
        self._size = _size(optimizer)

    def plain(self) -> list[Any]:
        """What the optimizer keeps besides tensors."""
        return list(_plain(list(self._optimizer.state.values()), [])) if self._has_plain else []

    def may_be_all(self, optimizer: Any) -> bool:
        """The optimizer has not begun to keep more."""
        return _size(optimizer) == self._size

    def same(self, other: _Watched) -> bool:
        return list(map(id, self.tensors)) == list(map(id, other.tensors))


class Beginning:
    """Of one step after the other.

    Attributes:
        tag: "step digest[ saved]", of a state that is taken; "": of none.
    """

    def __init__(self, state: RunState, module: Any, optimizer: Any) -> None:
        self._state, self._module, self._optimizer = state, module, optimizer
        self._has_more = any(type(m).get_extra_state is not nn.Module.get_extra_state for m in module.modules())
        self._taken: _Taken | None = None
        self._watched: _Watched | None = None
        # By id, of buffers and of what is large: most never change.
        self._digests: dict[int, tuple[tuple[int, int], int, Any]] = {}

    @property
    def tag(self) -> str:
        return "" if self._taken is None else self._taken.tag

    def take(self, saved: bool) -> str:
        """A step begins. ``saved``: there is a checkpoint of it.

        Raises:
            Exception: of a state_dict; of pickle; there is too much to copy in each step, or it is not in memory of the CPU.
        """
        self._taken = None
        small = pack((self._state.small(), self._settings(), self._more()))
        if len(small.structure) > COPIED:
            raise Unsupported(f"schedulers, data and extra have {len(small.structure)} bytes, too many for each step")
        if _is_copied(small):  # larger ones (an average of the model) are watched
            small = Packed(small.structure, [tensor.detach().clone() for tensor in small.tensors])
        if self._watched is None or not self._watched.may_be_all(self._optimizer):
            self._watched = _Watched(self._module, self._optimizer)
        tag = f"{self._state.progress.step} {self._digest(self._watched, small, known=True):08x}{' saved' * saved}"
        self._taken = _Taken(tag, small, _versions([*self._watched.tensors, *small.tensors]))
        return tag

    def drop(self) -> None:
        """It will not be there any more."""
        self._taken = None

    def is_there(self) -> bool:
        """Nothing shows that it has changed."""
        if self._taken is None:
            return False
        now, small = _Watched(self._module, self._optimizer), self._taken.small
        if self._watched is None or not self._watched.same(now):
            self._watched = None  # the script has put others in their place: they are found in the next step
            return False
        if _versions([*now.tensors, *small.tensors]) != self._taken.versions:
            return False
        return self._taken.tag.split()[1] == f"{self._digest(now, small, known=False):08x}"

    def content(self) -> dict[str, Any]:
        """As a checkpoint of this step. Its tensors are the model's own."""
        assert self._taken is not None
        small, settings, more = unpack(self._taken.small)
        model, optimizer = self._module.state_dict(), self._optimizer.state_dict()
        model.update(more)
        groups = zip(settings, optimizer["param_groups"], strict=True)
        optimizer["param_groups"] = [{**setting, "params": group["params"]} for setting, group in groups]
        return {"model": model, "optimizer": optimizer, "state": small, "buckets": None}

    def _settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def _more(self) -> dict[str, Any]:
        """Of the module's state_dict: what modules put there that is no tensor."""
        if not self._has_more:
            return {}
        state = self._module.state_dict()
        return {name: copied(value) for name, value in state.items() if name.endswith("_extra_state")}

    def _digest(self, watched: _Watched, small: Packed, known: bool) -> int:
        """``known``: what does not seem to have changed since the last time is not read again."""
        copies = _is_copied(small)
        found = [sample(watched.tensors), *(self._of(buffer, known) for buffer in watched.buffers)]
        found += [digest(tensor) if copies else self._of(tensor, known) for tensor in small.tensors]
        return _crc(repr((found, watched.plain(), unpack(Packed(small.structure, _Placeholders())))))

    def _of(self, tensor: Any, known: bool) -> int:
        if not known:
            return digest(tensor)
        now, before = (tensor.data_ptr(), tensor._version), self._digests.get(id(tensor))
        if before is None or before[0] != now or before[2]() is not tensor:
            self._digests[id(tensor)] = before = (now, digest(tensor), weakref.ref(tensor))
        return before[1]


class _Placeholders(list[Any]):
    """Instead of tensors, where only the rest counts."""

    def __getitem__(self, number: Any) -> Any:
        return f"tensor {number}"


def _is_copied(small: Packed) -> bool:
    return bool(sum(tensor.nbytes for tensor in small.tensors) <= COPIED)


def _versions(tensors: list[Any]) -> Versions:
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]


def _plain(value: Any, tensors: list[Any]) -> Iterator[Any]:
    """What is in it; tensors go to a list of their own."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, dict):
        yield from _plain(list(value.values()), tensors)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain(item, tensors)
    else:
        yield value


def _size(optimizer: Any) -> tuple[int, int]:
    return len(optimizer.state), sum(map(len, optimizer.state.values()))


def _crc(text: str) -> int:
    return checksum(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
