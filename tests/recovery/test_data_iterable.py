"""Loaders whose samples cannot be dealt out: a replacement goes through the epoch's beginning, a restart need not."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import data_cases as cases  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from ftcomm.errors import Closed, ConfigError, Unsupported  # noqa: E402
from ftcomm.recovery.data import Source, make_source  # noqa: E402
from ftcomm.recovery.data.iterable_source import IterableSource, StatefulSource  # noqa: E402


class Stream(IterableDataset):
    """Samples of a Noisy one, each worker its part."""

    def __init__(self, samples: int = 24) -> None:
        self.inner = cases.Noisy(samples)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for i in range(info.id if info else 0, len(self.inner), info.num_workers if info else 1):
            yield self.inner[i]


class Own:
    """The least that is called stateful; its order is of the epoch it was told."""

    def __init__(self, batches: int = 5) -> None:
        self.batches = batches
        self.epoch = self.next = self.given = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        start, self.next = self.next, 0
        for i in range(start, self.batches):
            self.next = i + 1
            self.given += 1
            yield (self.epoch, i, torch.rand(()).item())
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def of(loader: Any, rank: int = 0, slots: int = 2, **options: Any) -> Any:
    return make_source(loader, rank, slots, **{"keep_batch": False, "seed": 5, **options})


def batches(source: Source, steps: int = 1 << 30) -> list[Any]:
    """What is given and committed, at most so many steps of the epoch."""
    found: list[Any] = []
    while len(found) < steps and (share := source.draw([0, 1])) is not None:
        found.append(plain(share.batch))
        source.commit([0, 1])
    return found


def plain(batch: Any) -> Any:
    return [part[..., :1].tolist() + part[..., 2:].tolist() for part in batch] if isinstance(batch, list) else batch


def reloaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def noisy(workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(), 3, num_workers=workers, **options)


LOADERS = {
    "own": Own,
    "stream": noisy,
    "workers": lambda: noisy(2),
}


def test_a_replacement_has_the_same_samples_from_workers_that_persist() -> None:
    """Not the same random numbers: the predecessor's workers went on with theirs from epoch to epoch."""
    first, second = (of(noisy(2, persistent_workers=True)) for _ in range(2))
    batches(first)
    first.next_epoch()
    batches(first, 2)
    second.load_state_dict(first.state_dict())
    rest = batches(first)
    assert len(rest) == 6
    assert [batch[0] for batch in batches(second)] == [batch[0] for batch in rest]
    first.close()
    second.close()


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_replacement_has_the_same_rest(make: Any) -> None:
    first, second = of(make()), of(make())
    for _ in range(2):
        batches(first)
        first.next_epoch()
    head = batches(first, 2)
    second.load_state_dict(reloaded(first.state_dict()))
    assert (second.epoch, second.step) == (2, 2)
    rest = batches(first)
    assert batches(second) == rest
    first.next_epoch()
    second.next_epoch()
    following = batches(first)
    assert batches(second) == following
    assert head + rest != following
    first.close()
    second.close()


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_scripts_generators_do_not_notice(make: Any) -> None:
    before = cases.generators()
    one = of(make())
    first = batches(one)
    one.next_epoch()
    assert first
    assert batches(one) != first
    one.close()
    assert cases.generators() == before


def test_a_retry_gives_the_batch_in_hand() -> None:
    one = of(noisy())
    first = one.draw([0, 1])
    second = one.draw([0])
    assert second.batch is first.batch
    assert [(share.samples, share.total, share.filler) for share in (first, second)] == [(1, 2, False), (1, 1, False)]
    one.commit([0])
    assert one.draw([0, 1]).batch is not first.batch
    assert len(of([1, 2, 3])) == 3


def test_what_the_dead_should_have_computed_is_counted() -> None:
    one = of(Own(), slots=3)
    for alive, contributed in (([0, 1, 2], [0, 1]), ([0, 1], [0, 1]), ([0, 1, 2], [0])):
        one.draw(alive)
        one.commit(contributed)
    assert one.lost_steps == {1: 1, 2: 3}
    other = of(Own(), slots=3)
    other.load_state_dict(reloaded(one.state_dict()))
    assert other.state_dict() == one.state_dict()
    assert other.lost_steps == {1: 1, 2: 3}


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_a_restart_throws_no_batches_away(steps: int) -> None:
    first, loader = of(Own()), Own()
    batches(first)
    first.next_epoch()
    batches(first, steps)
    second = of(loader)
    assert isinstance(second, StatefulSource)
    second.load_state_dict(first.state_dict())
    local = reloaded(first.local_state())
    second.load_local_state(local)
    assert second.local_state() == local
    rest = batches(first)
    assert len(rest) == 5 - steps
    assert batches(second) == rest
    assert loader.given == len(rest)
    for one in (first, second):
        one.next_epoch()
    assert batches(first) == batches(second)


def test_a_local_state_of_another_step_is_refused() -> None:
    first, second = of(Own()), of(Own())
    batches(first, 2)
    old = first.local_state()
    first.draw([0, 1])
    with pytest.raises(ConfigError, match=r"Take its state after commit\(\)"):
        first.local_state()
    first.commit([0, 1])
    second.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match="epoch 0 and step 2, and the job is at epoch 0 and step 3"):
        second.load_local_state(old)
    assert batches(second) == batches(first)


def test_a_common_state_takes_the_place_of_a_local_one() -> None:
    first, second = of(Own()), of(Own())
    batches(first, 1)
    second.load_state_dict(first.state_dict())
    second.load_local_state(first.local_state())
    batches(first, 1)
    second.load_state_dict(first.state_dict())
    assert batches(second) == batches(first)


def test_a_samplers_epoch_is_set() -> None:
    data = cases.Noisy(12)

    class Sub(DataLoader):
        def __iter__(self) -> Any:
            return super().__iter__()

    one = of(Sub(data, 3, sampler=DistributedSampler(data, 2, 0)))
    first = batches(one)
    one.next_epoch()
    assert [batch[0] for batch in batches(one)] != [batch[0] for batch in first]


def test_no_worker_is_left_after_close() -> None:
    import multiprocessing

    for persistent in (False, True):
        loader = noisy(2, persistent_workers=persistent)
        one = of(loader)
        one.draw([0, 1])
        workers = one._iterator._workers
        assert all(worker.is_alive() for worker in workers)
        one.load_state_dict(one.state_dict())
        assert all(worker.is_alive() == persistent for worker in workers)
        one.close()
        assert not any(worker.is_alive() for worker in workers)
        assert not set(workers) & set(multiprocessing.active_children())
        with pytest.raises(Closed, match="was closed"):
            one.draw([0, 1])


def test_refused() -> None:
    with pytest.raises(Unsupported, match="which Own cannot give them. Use a torch DataLoader"):
        of(Own(), keep_batch=True)
    with pytest.raises(ConfigError, match="not of int"):
        of(5)
    with pytest.raises(ConfigError, match="generator can be iterated only once"):
        of(i for i in range(3))


def test_wrong_calls() -> None:
    one = of(Own(2))
    with pytest.raises(ConfigError, match=r"Call draw\(\) first"):
        one.commit([0])
    for alive in ([1], [0, 0], [0, 2], []):
        with pytest.raises(ConfigError, match="different slots of 0 to 1, slot 0 among them"):
            one.draw(alive)
    one.draw([0])
    with pytest.raises(ConfigError, match=r"slots \[1\] contributed to a step that only \[0\]"):
        one.commit([0, 1])
    with pytest.raises(ConfigError, match="Epoch 0 is not over: 0 steps are done"):
        one.next_epoch()
    with pytest.raises(TypeError):
        len(one)


@pytest.mark.parametrize("name", ["slots", "seed"])
def test_a_state_of_another_job_is_refused(name: str) -> None:
    state = of(Own()).state_dict()
    other = of(Own(), **{name: 3})
    with pytest.raises(ConfigError, match=f"state is of {name}={state[name]}, and here is {name}=3"):
        other.load_state_dict(state)


def test_a_shorter_loader_is_noticed_on_the_way_to_the_step() -> None:
    one, other = of(Own(5)), of(Own(3))
    batches(one, 4)
    other.load_state_dict(one.state_dict())
    with pytest.raises(ConfigError, match="ended after 3 batches, and 4 are done already"):
        other.draw([0, 1])


def test_any_iterable_will_do() -> None:
    one = of(["a", None, "c"])
    assert type(one) is IterableSource
    assert batches(one) == ["a", None, "c"]
    one.next_epoch()
    assert batches(one) == ["a", None, "c"]
    assert one.draw([0, 1]) is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 2, 4])
def test_torchdatas_loader(workers: int, steps: int) -> None:
    found = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        data = cases.Noisy(24)
        return found.StatefulDataLoader(data, 3, sampler=DistributedSampler(data, 2, 0), num_workers=workers)

    first, second, third = (of(make()) for _ in range(3))
    assert isinstance(first, StatefulSource)
    batches(first)
    first.next_epoch()
    batches(first, steps)
    for one in (second, third):
        one.load_state_dict(reloaded(first.state_dict()))
    third.load_local_state(first.local_state())
    rest = batches(first)
    assert len(rest) == 4 - steps
    assert batches(second) == rest
    restarted = batches(third)
    assert [batch[0] for batch in restarted] == [batch[0] for batch in rest]  # the samples
    if not workers:
        assert restarted == rest  # and the random numbers
        assert len(third._loader.dataset.asked) == 3 * len(rest)
    for one in (first, second, third):
        one.next_epoch()
    following = batches(first)
    assert [batch[0] for batch in following] != [batch[0] for batch in rest]
    assert batches(second) == following
    assert [batch[0] for batch in batches(third)] == [batch[0] for batch in following]
    for one in (first, second, third):
        one.close()
