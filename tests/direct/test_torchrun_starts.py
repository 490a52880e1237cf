"""Which start is this? Workers under torchrun agree on a number, whatever has become of those of earlier starts."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import pytest

import ftcomm
from ftcomm.torchrun import number_of_start


class Killed(BaseException):
    pass


class Round:
    """The processes of one start; those that still wait when it ends are killed. ``lives``: operations until a rank is killed."""

    def __init__(self, held: dict[str, bytes], size: int, lives: dict[int, int]) -> None:
        self._held, self._lives, self._ended = held, lives, False
        self._changed = threading.Condition()
        self.wanted: dict[int, str] = {}
        self.numbers: dict[int, int] = {}
        self.errors: list[Exception] = []
        self._waiting = set(range(size))  # ranks that are not waiting are on their way
        threads = [threading.Thread(target=self._run, args=(rank, size)) for rank in range(size)]
        for thread in random.sample(threads, size):
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._ended = True
            self._changed.notify_all()
        for thread in threads:
            thread.join()

    def _run(self, rank: int, size: int) -> None:
        try:
            self.numbers[rank] = number_of_start(Store(self, rank), "job", rank, size, 60.0)
        except Killed:
            pass
        except Exception as error:
            self.errors.append(error)
        with self._changed:
            self._waiting.discard(rank)
            self._changed.notify_all()

    def operate(self, rank: int, operation: Any) -> Any:
        with self._changed:
            self._lives[rank] = self._lives.get(rank, 1000) - 1
            if self._lives[rank] < 0 or self._ended:
                raise Killed
            found = operation(self._held)
            # Who waits for a key that is there now is on its way again.
            self._waiting |= {other for other, key in self.wanted.items() if key in self._held}
            self._changed.notify_all()
            return found

    def wait(self, rank: int, key: str) -> None:
        with self._changed:
            self.wanted = {**self.wanted, rank: key}
            if key not in self._held:
                self._waiting.discard(rank)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or key in self._held)
            self.wanted = {other: key for other, key in self.wanted.items() if other != rank}
            if key not in self._held:
                raise Killed
            self._waiting.add(rank)


class Store:
    """As torch's."""

    def __init__(self, round_: Round, rank: int) -> None:
        self._round, self._rank = round_, rank

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == ""
        return self._round.operate(self._rank, lambda held: held.setdefault(key, desired.encode()))

    def add(self, key: str, amount: int) -> int:
        def increase(held: dict[str, bytes]) -> int:
            held[key] = str(int(held.get(key, b"0")) + amount).encode()
            return int(held[key])

        return self._round.operate(self._rank, increase)

    def get(self, key: str) -> bytes:
        return self._round.operate(self._rank, lambda held: held[key])

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._round.operate(self._rank, lambda held: None)
        self._round.wait(self._rank, keys[0])


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_all_get_the_same_and_another_one_each_time(first: int) -> None:
    for seed in range(first, first + 100):
        random.seed(seed)
        held: dict[str, bytes] = {}
        used: set[int] = set()
        for start in range(4):
            size = random.choice([2, 3, 3, 3])
            doomed = random.sample(range(size), random.randint(0, size)) if start < 3 else []
            found = Round(held, size, {rank: random.randint(0, 14) for rank in doomed})
            assert not found.errors, seed
            assert len({*found.numbers.values()}) <= 1, seed
            assert not {*found.numbers.values()} & used, seed
            assert doomed or len(found.numbers) == size, seed
            used |= {*found.numbers.values()}


def test_who_never_comes_is_named() -> None:
    dist = pytest.importorskip("torch.distributed")
    with pytest.raises(ftcomm.Timeout, match=r"Rank 1, 2 of 3 never came") as caught:
        number_of_start(dist.HashStore(), "job", 0, 3, 0.2)
    assert caught.value.missing == (1, 2)
