"""The exception tree."""

from __future__ import annotations

import json
import pickle

import pytest

from ftcomm import errors


def test_every_code_has_its_class() -> None:
    detail = {"message": "Rank 2 died.", "ranks": [2], "evidence": ["pidfd"], "operation": "barrier #3", "epoch": 4}
    for code in range(1, 15):
        error = errors.from_json(code, json.dumps(detail))
        assert isinstance(error, errors.Error)
        assert str(error) == "Rank 2 died."
        assert (error.ranks, error.evidence, error.operation, error.epoch) == ((2,), ("pidfd",), "barrier #3", 4)
    assert type(errors.from_json(1, "{}")) is errors.PeerFailure
    assert type(errors.from_json(99, "")) is errors.InternalError


def test_timeout_names_the_missing() -> None:
    error = errors.from_json(5, json.dumps({"message": "m", "ranks": [1, 3], "operation": "all_reduce #1"}))
    assert isinstance(error, TimeoutError)
    assert (error.missing, error.operation) == ((1, 3), "all_reduce #1")


@pytest.mark.parametrize("name", errors.__all__)
def test_pickle_keeps_everything(name: str) -> None:
    kind = getattr(errors, name)
    if not isinstance(kind, type):
        return
    error = kind("m", ranks=[1], evidence=["left"], operation="o", epoch=7, value=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.fields()) == ("m", error.fields())


def test_detail_that_is_not_json() -> None:
    assert "garbled" in str(errors.from_json(10, "garbled"))
