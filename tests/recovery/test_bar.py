"""The progress bar counts committed steps, also in a run that goes on from a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tqdm")
torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import ftcomm.recovery  # noqa: E402


def run(folder: Path, epochs: int, bar: bool | None) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = ftcomm.recovery.Engine(model, optimizer, checkpoint_dir=folder)
    for _, (x,) in engine.steps(DataLoader(TensorDataset(torch.ones(40, 2)), 4), epochs, bar=bar):
        with engine.step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_steps_and_how_many_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, 2, True)
    assert "20/20" in capsys.readouterr().err
    run(tmp_path, 3, True)
    said = capsys.readouterr().err
    assert "30/30" in said
    assert " 20/30 " in said  # it begins where the checkpoint is, else the rate would be wrong


def test_no_bar_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, 1, None)
    assert "10/10" not in capsys.readouterr().err


def test_without_tqdm_a_bar_that_is_wanted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    run(tmp_path, 1, None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        run(tmp_path / "other", 1, True)
