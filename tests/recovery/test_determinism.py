"""Seeds, generator states, deterministic algorithms: the same bits again, and every setting put back."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.recovery import RngState, capture_rng, deterministic, restore_rng, seed_everything

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CUBLAS, raising=False)
    python, numpy = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    on = torch is not None and torch.are_deterministic_algorithms_enabled()
    yield
    os.environ.pop(CUBLAS, None)
    random.setstate(python)
    np.random.set_state(numpy)
    if (torch := sys.modules.get("torch")) is not None:
        torch.use_deterministic_algorithms(on)
        torch.backends.cudnn.deterministic = False


def draw() -> list[object]:
    """From every generator, also what NumPy keeps of a pair of normal numbers."""
    drawn: list[object] = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()]
    if (torch := sys.modules.get("torch")) is not None:
        drawn += [torch.rand(3).tolist(), torch.randn(3).tolist()]
    return drawn


def settings(torch: Any) -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        os.environ.get(CUBLAS),
    )


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_imports_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, ftcomm; module = ftcomm.recovery; module.seed_everything; module.plan_groups; module.worth_logging\n"
        "state = module.capture_rng()\n"
        "assert state.numpy is None and state.torch is None and state.cuda is None\n"
        "print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    )
    assert python(code) == "[]"


def test_the_package_exports_by_name() -> None:
    assert set(ftcomm.recovery.__all__) <= set(dir(ftcomm.recovery))
    for name in ftcomm.recovery.__all__:
        assert getattr(ftcomm.recovery, name).__module__.startswith("ftcomm.recovery.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ftcomm.recovery.nothing  # noqa: B018


def test_the_same_seed_draws_the_same() -> None:
    pytest.importorskip("torch")
    seed_everything(5, deterministic=False)
    first = draw()
    seed_everything(5, deterministic=False)
    assert draw() == first
    seed_everything(6, deterministic=False)
    assert not any(a == b for a, b in zip(draw(), first, strict=True))


def test_the_same_seed_draws_the_same_in_another_process() -> None:
    pytest.importorskip("torch")
    code = (
        "import ftcomm; ftcomm.recovery.seed_everything(5)\n"
        "import random, numpy, torch\n"  # torch is seeded although it comes later
        "print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.are_deterministic_algorithms_enabled())"
    )
    seed_everything(5)
    drawn = (random.random(), np.random.rand(), sys.modules["torch"].rand(1).item())
    assert python(code) == " ".join(map(str, drawn)) + " True"


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.0, True, None, "7"])
def test_wrong_seeds(seed: Any) -> None:
    before = random.getstate()
    with pytest.raises(ftcomm.ConfigError, match="must be a whole number from 0 to 4294967295"):
        seed_everything(seed)
    assert random.getstate() == before


def test_seeding_switches_determinism_on_only_if_asked() -> None:
    torch = pytest.importorskip("torch")
    before = settings(torch)
    seed_everything(1, deterministic=False)
    assert settings(torch) == before
    seed_everything(1)
    assert settings(torch) == (True, False, True, False, ":4096:8")


def test_restored_generators_draw_the_same() -> None:
    pytest.importorskip("torch")
    seed_everything(3, deterministic=False)
    draw()  # now Python and NumPy each hold the second of a pair of normal numbers
    state = capture_rng()
    first = draw()
    after = capture_rng()
    assert after != state
    restore_rng(pickle.loads(pickle.dumps(state)))
    assert capture_rng() == state
    assert draw() == first
    assert capture_rng() == after


def test_a_state_says_nothing_of_what_was_not_imported() -> None:
    seed_everything(3, deterministic=False)
    before = capture_rng()
    restore_rng(RngState(random.Random(9).getstate()))
    after = capture_rng()
    assert after.python == random.Random(9).getstate()
    assert (after.numpy, after.torch) == (before.numpy, before.torch)


def test_a_state_goes_to_another_process() -> None:
    pytest.importorskip("torch")
    seed_everything(8, deterministic=False)
    state = pickle.dumps(capture_rng())
    expected = [random.random(), np.random.rand(), sys.modules["torch"].rand(1).item()]
    code = (
        f"import pickle, ftcomm; ftcomm.recovery.restore_rng(pickle.loads({state!r}))\n"
        "import random, numpy, torch; print([random.random(), float(numpy.random.rand()), torch.rand(1).item()])"
    )
    assert python(code) == str([float(x) for x in expected])


def test_wrong_states() -> None:
    with pytest.raises(ftcomm.ConfigError, match="takes what capture_rng"):
        restore_rng(random.getstate())  # type: ignore[arg-type]


def test_numpy_with_another_generator() -> None:
    code = (
        "import numpy, ftcomm\n"
        "numpy.random.set_bit_generator(numpy.random.PCG64(1))\n"
        "try:\n    ftcomm.recovery.capture_rng()\n"
        "except ftcomm.Unsupported as error:\n    print(error)"
    )
    assert "replaced by PCG64" in python(code)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything(4, deterministic=False)
    full = capture_rng()
    monkeypatch.setitem(sys.modules, "torch", None)
    seed_everything(4)
    assert os.environ[CUBLAS] == ":4096:8"
    del os.environ[CUBLAS]
    with deterministic():
        assert os.environ[CUBLAS] == ":4096:8"
    assert CUBLAS not in os.environ
    state = capture_rng()
    assert state.torch is None
    restore_rng(state)
    if full.torch is not None:
        random.seed(0)
        before = random.getstate()
        with pytest.raises(ftcomm.ConfigError, match="torch is not installed"):
            restore_rng(full)
        assert random.getstate() == before


@pytest.mark.parametrize("workspace", [None, ":16:8", ":0:0"])
@pytest.mark.parametrize("algorithms", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("cudnn", [(False, True), (True, False)])
def test_the_context_puts_everything_back(
    workspace: str | None, algorithms: tuple[bool, bool], cudnn: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", cudnn[0])
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", cudnn[1])
    if workspace is not None:
        os.environ[CUBLAS] = workspace
    torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
    before = settings(torch)
    expected = (True, False, True, False, ":16:8" if workspace == ":16:8" else ":4096:8")
    with pytest.raises(KeyError), deterministic():
        assert settings(torch) == expected
        with deterministic():
            assert settings(torch) == expected
        assert settings(torch) == expected
        raise KeyError
    assert settings(torch) == before


def test_as_a_decorator() -> None:
    torch = pytest.importorskip("torch")

    @deterministic()
    def inside() -> tuple[object, ...]:
        return settings(torch)

    before = settings(torch)
    assert inside()[0] is True
    assert inside()[0] is True
    assert settings(torch) == before


def test_an_operation_without_a_deterministic_algorithm_raises() -> None:
    torch = pytest.importorskip("torch")
    data = torch.zeros(4)
    indexes = torch.tensor([0, 1])
    data.put_(indexes, torch.ones(2), accumulate=False)
    with deterministic(), pytest.raises(RuntimeError, match="deterministic"):
        data.put_(indexes, torch.ones(2), accumulate=False)


class PretendedCuda:
    """Two devices whose states are a byte tensor each; there is no CUDA where most tests run."""

    def __init__(self, torch: Any, devices: int = 2) -> None:
        self.torch = torch
        self.states = [torch.tensor([device, 7], dtype=torch.uint8) for device in range(devices)]
        self.used = True

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state_all(self) -> list[Any]:
        assert self.used, "this would start CUDA"
        return [state.clone() for state in self.states]

    def set_rng_state(self, state: Any, device: int) -> None:
        assert state.dtype == self.torch.uint8
        self.states[device] = state


def pretended(monkeypatch: pytest.MonkeyPatch, torch: Any, devices: int) -> SimpleNamespace:
    cuda = PretendedCuda(torch, devices)
    names = ("is_available", "is_initialized", "device_count", "get_rng_state_all", "set_rng_state")
    for name in names:
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return SimpleNamespace(cuda=cuda)


def test_states_of_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    cuda = pretended(monkeypatch, torch, 2).cuda
    cuda.used = False
    assert capture_rng().cuda is None
    cuda.used = True
    state = capture_rng()
    assert state.cuda == (b"\x00\x07", b"\x01\x07")
    cuda.states = [torch.zeros(2, dtype=torch.uint8)] * 2
    restore_rng(pickle.loads(pickle.dumps(state)))
    assert [s.tolist() for s in cuda.states] == [[0, 7], [1, 7]]
    pretended(monkeypatch, torch, 1)
    before = random.getstate()
    random.random()
    moved = random.getstate()
    with pytest.raises(ftcomm.ConfigError, match="of 2 CUDA devices, and here are 1"):
        restore_rng(state)
    assert random.getstate() == moved != before


def test_states_of_real_cuda_devices(on_gpu: Any) -> None:
    def run(device: str) -> None:
        import torch

        torch.rand(1, device=device)
        state = capture_rng()
        first = torch.rand(3, device=device).tolist()
        restore_rng(state)
        assert torch.rand(3, device=device).tolist() == first

    on_gpu(run)
