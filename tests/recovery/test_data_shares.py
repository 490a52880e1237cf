"""Each sample of an epoch is committed once, whoever dies, joins or retries; and each rank reckons the same."""

from __future__ import annotations

import collections
import io
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ftcomm.errors import ConfigError, InternalError  # noqa: E402
from ftcomm.recovery.data import Shares  # noqa: E402
from ftcomm.recovery.data.ranges import count, cut, deal, merged  # noqa: E402

SEEDS = 400


def make(samples: int = 50, batch_size: int = 3, slots: int = 4, **changes: Any) -> Shares:
    options = {"shuffle": True, "seed": 7, "drop_last": False, "keep_batch": False, **changes}
    return Shares(samples, batch_size, slots, **options)


def order(shares: Shares) -> list[int]:
    """Of the present epoch."""
    return shares.indexes([(0, shares.samples)])


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run_epoch(shares: Shares, chance: random.Random) -> tuple[Shares, collections.Counter[int]]:
    """With deaths, joins, steps that are dropped and restarts from the state; returns what was committed."""
    used: collections.Counter[int] = collections.Counter()
    slots = range(shares.slots)
    alive = list(slots)
    while not shares.finished:
        if chance.random() < 0.4:
            alive = chance.sample(slots, chance.randint(1, shares.slots))
        assigned = shares.assign(alive)
        if chance.random() < 0.2:  # dropped: the next one may have others
            continue
        sizes = [len(part) for part in assigned.values()]
        whole = shares.batch_size * shares.slots
        assert set(assigned) == set(alive)
        if shares.step < shares.samples // whole:
            for slot in alive:
                start = (shares.step * shares.slots + slot) * shares.batch_size
                assert assigned[slot][: shares.batch_size] == order(shares)[start : start + shares.batch_size]
            assert not shares.keep_batch or sum(sizes) == whole
        assert sum(sizes) <= whole
        assert shares.keep_batch or max(sizes) <= shares.batch_size
        if shares.keep_batch or shares.step >= shares.steps:
            assert max(sizes) - min(sizes) <= 1
        contributed = [slot for slot in alive if chance.random() < 0.8]
        for slot in contributed:
            used.update(assigned[slot])
        shares.commit(alive, contributed)
        if chance.random() < 0.2:
            other = again(shares)
            other.load_state_dict(reloaded(shares.state_dict()))
            assert other.state_dict() == shares.state_dict()
            shares = other
    return shares, used


def again(shares: Shares) -> Shares:
    return Shares(
        shares.samples,
        shares.batch_size,
        shares.slots,
        shuffle=shares.shuffle,
        seed=shares.seed,
        drop_last=shares.drop_last,
        keep_batch=shares.keep_batch,
    )


@pytest.mark.parametrize("keep_batch", [False, True])
def test_each_sample_once(keep_batch: bool) -> None:
    for seed in range(SEEDS):
        chance = random.Random(seed)
        batch_size, slots = chance.randint(1, 5), chance.randint(1, 5)
        drop_last = chance.random() < 0.3
        least = batch_size * slots if drop_last else 1
        samples = chance.randint(least, least + 60)
        shares = make(
            samples,
            batch_size,
            slots,
            shuffle=chance.random() < 0.7,
            seed=seed,
            drop_last=drop_last,
            keep_batch=keep_batch,
        )
        for epoch in range(3):
            assert shares.epoch == epoch
            size = samples - samples % (batch_size * slots) if drop_last else samples
            expected = order(shares)[:size]
            assert sorted(order(shares)) == list(range(samples))
            shares, used = run_epoch(shares, chance)
            assert used == collections.Counter(expected), f"seed {seed}, epoch {epoch}"
            shares.next_epoch()


def test_without_failures_an_epoch_has_its_regular_steps_only() -> None:
    shares = make(50, 3, 4)
    sizes = []
    while not shares.finished:
        sizes.append([len(part) for part in shares.assign(range(4)).values()])
        shares.commit(range(4), range(4))
    assert sizes == [[3] * 4] * 4 + [[1, 1, 0, 0]]
    assert shares.steps == 5


def test_a_dead_slots_samples_go_to_the_others_in_the_same_step() -> None:
    shares = make(24, 3, 4, shuffle=False, keep_batch=True)
    assert shares.assign([0, 2, 3]) == {0: [0, 1, 2, 3], 2: [6, 7, 8, 4], 3: [9, 10, 11, 5]}
    shares.commit([0, 2, 3], [0, 2, 3])
    assert shares.assign([1]) == {1: [15, 16, 17, 12, 13, 14, *range(18, 24)]}


def test_a_dead_slots_samples_wait_for_extra_steps() -> None:
    shares = make(24, 3, 4, shuffle=False)
    for _ in range(2):
        shares.commit([0, 1, 3], [0, 1])
    assert (shares.finished, shares.pending, shares.step) == (False, 12, 2)
    assert shares.assign([0, 1]) == {0: [6, 7, 8], 1: [9, 10, 11]}
    shares.commit([0, 1], [1])
    assert shares.assign([0, 1, 2, 3]) == {0: [6, 7, 8], 1: [18, 19], 2: [20, 21], 3: [22, 23]}
    shares.commit([0, 1, 2, 3], [0, 1, 2, 3])
    assert shares.finished


def test_the_order_is_of_seed_and_epoch() -> None:
    first, second = make(seed=1), make(seed=1)
    orders = []
    for shares in (first, second):
        for _ in range(2):
            orders.append(order(shares))
            while not shares.finished:
                shares.commit([0], [0])
            shares.next_epoch()
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]
    assert order(make(seed=2)) not in orders  # the seed plus the epoch would be one of them
    assert order(make(shuffle=False)) == list(range(50))


def test_what_waits_is_kept_in_ranges() -> None:
    shares = make(10_000, 10, 4)
    while shares.step < shares.steps:
        shares.commit([0, 1], [0, 1])
    assert shares.pending == 5_000
    assert len(shares.state_dict()["pending"]) == 250


def test_a_step_is_not_deals_of_the_same_samples() -> None:
    """Assigning changes nothing: a retry has the same, also after it had others in between."""
    shares = make(keep_batch=True)
    before = shares.state_dict()
    first = shares.assign([0, 1, 2, 3])
    assert shares.assign([1, 2]) != first
    assert shares.assign([0, 1, 2, 3]) == first
    assert shares.state_dict() == before


@pytest.mark.parametrize("name", ["samples", "batch_size", "slots", "seed", "shuffle", "drop_last"])
def test_a_state_of_other_data_is_refused(name: str) -> None:
    other = {"samples": 51, "batch_size": 2, "slots": 5, "seed": 8, "shuffle": False, "drop_last": True}
    shares = make(**{name: other[name]})
    before = shares.state_dict()
    mine = getattr(make(), name)
    with pytest.raises(ConfigError, match=f"state is of {name}={mine}, and here is {name}={other[name]}"):
        shares.load_state_dict(make().state_dict())
    assert shares.state_dict() == before


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1},
        {"committed": 3},
        {"committed": -3},
        {"pending": [[0, 3]]},
        {"step": 1, "committed": 0, "pending": [[6, 12], [0, 6]]},
        {"step": 1, "committed": 0, "pending": [[0, 7], [6, 11]]},
        {"step": 1, "committed": 0, "pending": [[-12, 0]]},
        {"step": 1, "committed": 0, "pending": [[20, 32]]},
        {"pending": 5},
        {"pending": [[1, 2, 3]]},
        {"epoch": -1},
        {"epoch": None},
        {"step": "1"},
    ],
)
def test_a_state_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    shares = make()
    before = shares.state_dict()
    with pytest.raises(ConfigError, match="This is no state of a data source"):
        shares.load_state_dict({**before, **change})
    with pytest.raises(ConfigError, match="it has no 'samples'"):
        shares.load_state_dict({})
    assert shares.state_dict() == before


@pytest.mark.parametrize("alive", [[], [0, 0], [4], [-1], [0, 1, 2, 3, 4]])
def test_wrong_slots(alive: list[int]) -> None:
    with pytest.raises(ConfigError, match="one or more different slots of 0 to 3"):
        make().assign(alive)


def test_wrong_calls() -> None:
    shares = make(6, 3, 2)
    with pytest.raises(ConfigError, match=r"slots \[1\] contributed to a step that only \[0\]"):
        shares.commit([0], [0, 1])
    with pytest.raises(ConfigError, match="is not over: step 0 of 1"):
        shares.next_epoch()
    shares.commit([0, 1], [0])
    with pytest.raises(ConfigError, match="3 samples wait"):
        shares.next_epoch()
    shares.commit([0, 1], [0, 1])
    with pytest.raises(ConfigError, match=r"is over.*Call next_epoch"):
        shares.assign([0, 1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"samples": 0}, "samples=0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be"),
        ({"slots": True}, "slots=True must be"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"seed": 1 << 63}, "must be a whole number from 0"),
        ({"samples": 11, "drop_last": True}, "the 11 samples make no step"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(**change)


def test_a_sample_that_got_lost_is_a_bug() -> None:
    shares = make()
    shares._pending.append((0, 3))  # and nobody counted it
    shares.step = shares.steps
    shares._waiting = 1
    with pytest.raises(InternalError, match="which is not 50"):
        shares.commit([0], [0])


def test_ranges() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        places = chance.sample(range(60), chance.randint(0, 40))
        ranges = merged((place, place + 1) for place in places)
        assert [place for start, stop in ranges for place in range(start, stop)] == sorted(places)
        size = chance.randint(0, 45)
        first, rest = cut(ranges, size)
        assert count(first) == min(size, len(places))
        assert merged([*first, *rest]) == ranges
        loads = {slot: chance.choice([2, 3]) for slot in range(chance.randint(1, 6))}
        dealt = deal(ranges, loads)
        totals = [loads[slot] + count(part) for slot, part in dealt.items()]
        assert max(totals) - min(totals) <= 1
        assert merged(one for part in dealt.values() for one in part) == ranges
