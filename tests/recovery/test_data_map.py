"""Batches of a DataLoader's dataset: each sample once, the same bits after a retry or a restore, workers that load ahead."""

from __future__ import annotations

import collections
import multiprocessing
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import data_cases as cases  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from ftcomm.errors import Closed, ConfigError, Unsupported  # noqa: E402
from ftcomm.recovery.data import Source, make_source  # noqa: E402
from ftcomm.recovery.data.map_source import MapSource  # noqa: E402
from ftcomm.recovery.data.seeded import SeededDataset, WorkerInit  # noqa: E402

WORKERS = {0: {}, 2: {"num_workers": 2, "prefetch_factor": 2}}


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes sources that are closed afterwards."""
    made: list[Source] = []

    def make(dataset: Any, rank: int = 0, slots: int = 2, **options: Any) -> Any:
        mine = {name: options.pop(name) for name in ("keep_batch", "seed", "reseed") if name in options}
        loader = DataLoader(dataset, **{"batch_size": 3, "shuffle": True, **options})
        made.append(make_source(loader, rank, slots, **{"keep_batch": False, "seed": 5, **mine}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def job() -> Iterator[Any]:
    made: list[cases.Job] = []

    def make(dataset: Any, slots: int, workers: int, **options: Any) -> cases.Job:
        loader = {"batch_size": 3, "shuffle": True, **WORKERS[workers]}
        made.append(cases.Job(lambda: DataLoader(dataset, **loader), slots, **{"seed": 5, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same(a: Any, b: Any) -> bool:
    """Samples and random numbers; who loaded them may differ."""
    return torch.equal(a.batch[0][:, 0], b.batch[0][:, 0]) and torch.equal(a.batch[1], b.batch[1])


def rest(source: Source, alive: Any = (0, 1)) -> list[Any]:
    """The other shares of the epoch."""
    shares = []
    while (share := source.draw(alive)) is not None:
        shares.append(share)
        source.commit(alive)
    return shares


def undisturbed(job: Any, samples: int) -> list[dict[int, tuple[float, ...]]]:
    """The random numbers of each sample in two epochs."""
    calm = job(cases.Noisy(samples), 1, 0, keep_batch=False)
    epochs = []
    for _ in range(2):
        while (shares := calm.draw()) is not None:
            calm.commit(shares, [0])
        epochs.append(dict(calm.noise))
        calm.next_epoch()
    assert epochs[0] != epochs[1]
    return epochs


@pytest.mark.parametrize("keep_batch", [False, True])
@pytest.mark.parametrize(("workers", "slots", "seeds"), [(0, 4, 15), (2, 2, 1)])
def test_each_sample_once_with_the_same_random_numbers(
    job: Any, keep_batch: bool, workers: int, slots: int, seeds: int
) -> None:
    for seed in range(seeds):
        chance = random.Random(seed)
        samples = 41
        expected = undisturbed(job, samples)
        wild = job(cases.Noisy(samples), slots, workers, keep_batch=keep_batch)
        for epoch in range(2):
            while (shares := wild.draw()) is not None:
                if chance.random() < 0.2 and len(wild.alive) > 1:  # a death; what was drawn is drawn again
                    wild.die([chance.choice(wild.alive)])
                    continue
                wild.commit(shares, [slot for slot in wild.alive if chance.random() < 0.9])
                if len(wild.alive) < slots and chance.random() < 0.5:
                    wild.join(chance.choice([slot for slot in range(slots) if slot not in wild.alive]))
            assert wild.used == collections.Counter(range(samples))
            assert wild.noise == expected[epoch]
            wild.next_epoch()
        wild.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_retry_gives_the_batch_in_hand(source: Any, workers: int) -> None:
    one = source(cases.Noisy(40), keep_batch=True, **WORKERS[workers])
    first = one.draw([0, 1])
    again = one.draw([1, 0])
    assert again.batch is first.batch
    alone = one.draw([0])
    assert (first.samples, first.total, alone.samples, alone.total) == (3, 6, 6, 6)
    assert cases.indexes(alone)[:3] == cases.indexes(first)
    assert alone.batch[1][:3].equal(first.batch[1])
    assert same(one.draw([0, 1]), first)
    one.commit([0, 1])
    assert not same(one.draw([0, 1]), first)


def test_a_death_that_changes_nothing_for_this_rank_leaves_its_batch(source: Any) -> None:
    dataset = cases.Noisy(40)
    one = source(dataset)
    first = one.draw([0, 1])
    second = one.draw([0])
    assert second.batch is first.batch
    assert (first.total, second.total) == (6, 3)
    assert len(dataset.asked) == 3


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 2), (2, 0), (0, 2)])
def test_restored_in_mid_epoch_the_rest_is_the_same(source: Any, before: int, after: int) -> None:
    one = source(cases.Noisy(40), **WORKERS[before])
    for _ in range(2):
        one.draw([0, 1])
        one.commit([0] if one.step == 1 else [0, 1])
    state = one.state_dict()
    one.draw([0, 1])
    assert one.state_dict() == state  # what is drawn is not used yet
    dataset = cases.Noisy(40)
    other = source(dataset, **WORKERS[after])
    if after:
        other.draw([0, 1])  # its workers are at the beginning
    other.load_state_dict(state)
    first = rest(other)
    if not after:
        assert dataset.asked == [index for share in first for index in cases.indexes(share)]
    for mine, its in zip(rest(one), first, strict=True):
        assert same(mine, its)
    assert one.state_dict() == other.state_dict()
    assert state["pending"]
    one.next_epoch()
    other.next_epoch()
    assert [cases.noise(share) for share in rest(one)] == [cases.noise(share) for share in rest(other)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_without_samples_has_a_filler(source: Any, workers: int) -> None:
    first, second = (source(cases.Noisy(7), rank, **WORKERS[workers]) for rank in (0, 1))
    shares = [rest(one) for one in (first, second)]
    assert [(share.samples, share.total, share.filler) for share in shares[0]] == [(3, 6, False), (1, 1, False)]
    assert [(share.samples, share.total, share.filler) for share in shares[1]] == [(3, 6, False), (0, 1, True)]
    assert shares[1][1].batch[0].shape == (1, 2)


def test_more_slots_than_samples(source: Any) -> None:
    shares = [rest(source(cases.Noisy(2), rank, slots=5), range(5)) for rank in range(5)]
    assert [share.filler for (share,) in shares] == [False, False, True, True, True]


def to_the_end(one: Any) -> set[int]:
    """Draws until the epoch is over; slot 1 dies after step 5. The processes that have loaded something."""
    alive, used = [0, 1], set()
    while (share := one.draw(alive)) is not None:
        used |= cases.pids(share)
        one.commit(alive)
        if one.step == 5:
            alive = [0]
    return used


def test_a_death_with_own_samples_only_stops_no_worker_and_loads_nothing_here(source: Any) -> None:
    dataset = cases.Noisy(120)
    one = source(dataset, **WORKERS[2])
    used = to_the_end(one)
    assert one.step == 35
    assert dataset.asked == []
    assert len(used) == 2


def test_after_a_death_workers_soon_load_what_the_dead_one_had(source: Any) -> None:
    dataset = cases.Noisy(120)
    one = source(dataset, keep_batch=True, **WORKERS[2])
    used = to_the_end(one)
    assert one.step == 20
    assert 0 < len(dataset.asked) <= 4 * 6  # at most num_workers * prefetch_factor batches
    assert len(used) == 3  # two workers, and this process


def test_workers_load_what_was_lost_in_mid_step(source: Any) -> None:
    dataset = cases.Noisy(120)
    one = source(dataset, **WORKERS[2])
    while one.draw([0, 1]) is not None:
        one.commit([0] if one.step < 8 else [0, 1])
    assert one.step == 24
    assert dataset.asked == []


@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_is_left_after_close(source: Any, persistent: bool) -> None:
    one = source(cases.Noisy(24), persistent_workers=persistent, **WORKERS[2])
    epochs = []
    for _ in range(2):
        epochs.append({pid for share in rest(one) for pid in cases.pids(share)})
        one.next_epoch()
    one.draw([0, 1])
    one.load_state_dict(one.state_dict())
    one.draw([0, 1])
    one.load_state_dict(one.state_dict())  # with persistent workers nothing is iterated now, and they wait
    assert len(epochs[0] | epochs[1]) == (2 if persistent else 4)
    alive = {pid for pid in epochs[0] | epochs[1] if Path(f"/proc/{pid}").exists()}
    assert alive == (epochs[0] if persistent else set())
    one.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in epochs[0] | epochs[1])
    one.close()
    with pytest.raises(Closed, match="was closed"):
        one.draw([0, 1])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [cases.Noisy, cases.Together])
def test_the_scripts_generators_do_not_notice(source: Any, workers: int, dataset: Any) -> None:
    one = source(dataset(12), keep_batch=True, **WORKERS[workers])
    random.gauss(0, 1)
    before = cases.generators()
    one.draw([0, 1])
    one.draw([0])
    one.commit([0])
    rest(one)
    one.next_epoch()
    rest(one)
    one.close()
    assert cases.generators() == before


def test_an_error_of_the_dataset_leaves_the_generators(source: Any) -> None:
    class Broken(cases.Noisy):
        def __getitem__(self, i: int) -> Any:
            super().__getitem__(i)
            raise KeyError("no such file")

    one = source(Broken(12))
    before = cases.generators()
    with pytest.raises(KeyError, match="no such file"):
        one.draw([0, 1])
    assert cases.generators() == before


def test_without_reseeding_the_scripts_generators_are_used(source: Any) -> None:
    one = source(cases.Noisy(12), reseed=False)
    random.seed(3)
    first = cases.noise(one.draw([0, 1]))
    random.seed(4)
    one.load_state_dict(one.state_dict())
    assert cases.noise(one.draw([0, 1])) != first


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_reads_many_samples_at_a_time(source: Any, workers: int) -> None:
    first, second = (source(cases.Together(24), **WORKERS[w]) for w in (0, workers))
    for mine, its in zip(rest(first), rest(second), strict=True):
        assert same(mine, its)
        assert len(set(cases.noise(mine).values())) == 3


class FailsOnce(cases.Noisy):
    """In a worker, not here."""

    def __getitem__(self, i: int) -> Any:
        if i == 6 and get_worker_info() is not None:
            raise KeyError("no such file")
        return super().__getitem__(i)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_were_started_before_the_state_came_load_from_there_on(source: Any, persistent: bool) -> None:
    one = source(cases.Noisy(40))
    one.draw([0, 1])
    one.commit([0, 1])
    state, wanted = one.state_dict(), rest(one)
    dataset = cases.Noisy(40)
    other = source(dataset, persistent_workers=persistent, **WORKERS[2])
    other.warm()
    there = {child.pid for child in multiprocessing.active_children()}
    assert len(there) == 2
    other.load_state_dict(state)
    shares = rest(other)
    assert all(map(same, shares, wanted))
    assert len(shares) == len(wanted)
    assert {pid for share in shares for pid in cases.pids(share)} == there
    assert dataset.asked == []
    other.next_epoch()
    assert ({pid for share in rest(other) for pid in cases.pids(share)} == there) is persistent
    other.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_never_got_to_load_are_ended(source: Any, persistent: bool) -> None:
    one = source(cases.Noisy(40), persistent_workers=persistent, **WORKERS[2])
    one.warm()
    assert len(multiprocessing.active_children()) == 2
    one.close()
    assert not multiprocessing.active_children()


def test_after_an_error_in_a_worker_the_step_can_be_drawn_again(source: Any) -> None:
    dataset = FailsOnce(24)
    one = source(dataset, shuffle=False, **WORKERS[2])
    one.draw([0, 1])
    one.commit([0, 1])
    with pytest.raises(KeyError, match="no such file"):
        one.draw([0, 1])
    assert cases.indexes(one.draw([0, 1])) == [6, 7, 8]
    one.commit([0, 1])
    assert [cases.indexes(share) for share in rest(one)] == [[12, 13, 14], [18, 19, 20]]
    assert dataset.asked == [6, 7, 8]


def test_an_error_in_a_batch_that_nobody_wants_is_no_error(source: Any) -> None:
    one = source(FailsOnce(24), shuffle=False, keep_batch=True, **WORKERS[2])
    one.draw([0, 1])
    one.commit([0, 1])
    for alive in ([0], [0, 1]):  # the batch with sample 6 is under way; here it is loaded with others
        assert cases.indexes(one.draw(alive))[0] == 2 * one.step * 3
        one.commit(alive)


def mark(worker: int) -> None:
    get_worker_info().dataset.opened = worker  # type: ignore[union-attr]


class Opened(cases.Noisy):
    opened = -1

    def __getitem__(self, i: int) -> Any:
        return self.opened


def test_workers_are_told_of_the_scripts_dataset(source: Any) -> None:
    one = source(Opened(24), worker_init_fn=mark, **WORKERS[2])
    assert [set(share.batch.tolist()) for share in rest(one)] == [{0}, {1}, {0}, {1}]


def test_what_goes_to_spawned_workers_can_be_pickled() -> None:
    dataset = pickle.loads(pickle.dumps(SeededDataset(cases.Noisy(3), 5, True)))
    again = SeededDataset(cases.Noisy(3), 5, True)
    assert all(a.equal(b) for a, b in zip(dataset[0, 1], again[0, 1], strict=True))
    assert isinstance(pickle.loads(pickle.dumps(WorkerInit(cases.indexes))), WorkerInit)


def of(loader: Any, slots: int = 2, **options: Any) -> Any:
    return make_source(loader, 0, slots, **{"keep_batch": False, "seed": None, **options})


def test_what_the_loader_says_is_taken_over() -> None:
    data = cases.Noisy(20)
    plain = of(DataLoader(data, 3)).shares
    assert (plain.batch_size, plain.shuffle, plain.drop_last, plain.seed, plain.samples) == (3, False, False, 0, 20)
    assert of(DataLoader(data, 3, shuffle=True, drop_last=True)).shares.drop_last
    assert of(DataLoader(data, 3, shuffle=True, drop_last=True)).shares.shuffle
    assert of(DataLoader(data, 3, shuffle=True), seed=4).shares.seed == 4
    shared = DistributedSampler(data, 2, 1, seed=9, drop_last=True)
    told = of(DataLoader(data, 3, sampler=shared)).shares
    assert (told.shuffle, told.drop_last, told.seed) == (True, True, 9)
    assert of(DataLoader(data, 3, sampler=shared), seed=4).shares.seed == 9
    assert not of(DataLoader(data, 3, sampler=DistributedSampler(data, 2, 1, shuffle=False))).shares.shuffle
    assert len(of(DataLoader(data, 3))) == 4
    assert of(DataLoader(Subset(data, range(5, 15)), 2, collate_fn=list)).draw([0, 1]).batch[1][0][0] == 6


def test_a_distributed_samplers_seed_is_of_the_order_only() -> None:
    """The engine gives a seed always: augmentations have that one."""

    def drawn(order: int, seed: int) -> tuple[Any, Any]:
        data = cases.Noisy(8)
        loader = DataLoader(data, 8, sampler=DistributedSampler(data, 1, 0, seed=order))
        samples, noise = of(loader, slots=1, seed=seed).draw([0]).batch
        return samples[:, 0], noise

    (numbers, noise), (again, other), (moved, same) = (drawn(*seeds) for seeds in [(7, 0), (7, 1), (8, 0)])
    assert numbers.equal(again)
    assert not noise.equal(other)
    assert not numbers.equal(moved)
    assert noise[numbers.argsort()].equal(same[moved.argsort()])


class Sampler(RandomSampler):
    pass


class Unsized:
    def __getitem__(self, i: int) -> int:
        return i


DATA = cases.Noisy(20)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 20, 20)), "sampler WeightedRandomSampler is not known"),
        (lambda: DataLoader(DATA, sampler=Sampler(DATA)), r"Sampler is not known.*Use shuffle=True.*or wrap"),
        (lambda: DataLoader(DATA, sampler=list(range(20))), "The sampler list is not known"),
        (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "with replacement uses samples more than"),
        (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=7)), "RandomSampler draws 7 samples.*has 20"),
        (lambda: DataLoader(DATA, sampler=SequentialSampler(range(5))), "SequentialSampler draws 5 samples.*has 20"),
        (lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 3, 0)), "num_replicas=3, and the job has 2 slots"),
        (lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, False)), "batch_sampler BatchSampler"),
        (lambda: DataLoader(DATA, batch_size=None), "batch_size=None makes no batches"),
        (lambda: DataLoader(Unsized(), 2, sampler=SequentialSampler(DATA)), "Unsized has no __len__"),
        (lambda: DataLoader([], 2), "list is empty: its length is 0"),
        (lambda: DataLoader(DATA, 11, drop_last=True), "the 20 samples make no step"),
    ],
)  # fmt: skip
def test_refused_loaders(loader: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        of(loader())


def test_wrong_calls(source: Any) -> None:
    with pytest.raises(ConfigError, match="rank=2 must be from 0 to 1"):
        make_source(DataLoader(DATA), 2, 2, keep_batch=False)
    one = source(cases.Noisy(20))
    with pytest.raises(ConfigError, match=r"Call draw\(\) first"):
        one.commit([0])
    with pytest.raises(ConfigError, match=r"Slot 0 draws a batch, but only \[1\]"):
        one.draw([1])
    one.draw([0, 1])
    one.commit([0, 1])
    with pytest.raises(ConfigError, match=r"Call draw\(\) first"):
        one.commit([0, 1])
    with pytest.raises(ConfigError, match="is not over"):
        one.next_epoch()


def test_a_loader_that_iterates_in_its_own_way_is_not_dealt_out() -> None:
    class Own(DataLoader):
        def __iter__(self) -> Any:
            return super().__iter__()

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(6))

    assert not isinstance(of(Own(DATA)), MapSource)
    assert not isinstance(of(DataLoader(Stream())), MapSource)
    with pytest.raises(Unsupported, match="DataLoader cannot give them"):
        of(DataLoader(Stream()), keep_batch=True)


def test_pinned_memory_also_for_what_is_loaded_here(on_gpu: Any) -> None:
    def run(device: str) -> None:
        loader = DataLoader(cases.Noisy(20), batch_size=3, shuffle=True, pin_memory=True, **WORKERS[2])
        one = make_source(loader, 0, 2, keep_batch=True, seed=5)
        try:
            assert all(part.is_pinned() for part in one.draw([0, 1]).batch)
            assert all(part.is_pinned() for part in one.draw([0]).batch)
        finally:
            one.close()

    on_gpu(run)
