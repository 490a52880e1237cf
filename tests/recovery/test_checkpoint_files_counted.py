"""Checkpoints that count only when others say so: what is saved without pruning, and pruned or discarded afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from ftcomm.recovery import CheckpointFolder  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    with CheckpointFolder(tmp_path, keep=2) as made:
        yield made


def save(folder: CheckpointFolder, *steps: int, wait: bool = True) -> None:
    for step in steps:
        folder.save(step, {"step": step}, wait, prune=False)


@pytest.mark.parametrize("wait", [True, False])
def test_nothing_goes_before_it_is_said(folder: CheckpointFolder, wait: bool) -> None:
    save(folder, 1, 2, 3, wait=wait)
    folder.wait()
    assert folder.steps() == [1, 2, 3]
    folder.prune(3)
    assert folder.steps() == [2, 3]


def test_later_ones_stay_and_do_not_count(folder: CheckpointFolder) -> None:
    save(folder, 2, 4, 8, 9)
    folder.prune(4)
    assert folder.steps() == [2, 4, 8, 9]
    save(folder, 6)
    folder.prune(6)
    assert folder.steps() == [4, 6, 8, 9]


def test_a_damaged_one_does_not_count(folder: CheckpointFolder, tmp_path: Path) -> None:
    save(folder, 1, 2)
    (middle,) = tmp_path.glob("step-*2-*.pt")
    middle.write_bytes(b"half a pick")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert folder.newest() == (1, {"step": 1})
    save(folder, 3)
    folder.prune(3)
    assert folder.load(1) == {"step": 1}
    save(folder, 4)
    folder.prune(4)
    assert folder.steps() == [3, 4], "and goes with those that are older"


def test_what_is_discarded_is_as_if_it_had_not_been_saved(folder: CheckpointFolder) -> None:
    save(folder, 1, 2, 3)
    folder.discard(3)
    folder.discard(7)
    assert folder.steps() == [1, 2]
    assert folder.newest() == (2, {"step": 2})
    save(folder, 3)
    assert folder.newest() == (3, {"step": 3})
