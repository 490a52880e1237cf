"""What a checkpoint file may hold: the same bits come back, shared memory stays shared, the rest is refused with its place."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402

from ftcomm.errors import ConfigError  # noqa: E402
from ftcomm.recovery import CheckpointFolder, capture_rng  # noqa: E402

both = pytest.mark.parametrize("wait", [True, False])


def through(folder: Path, state: dict[Any, Any], wait: bool = True) -> Any:
    """What plain torch reads of the only file."""
    with CheckpointFolder(folder, keep=1) as checkpoints:
        checkpoints.save(1, state, wait=wait)
    return torch.load(path_of(folder), weights_only=True)


def path_of(folder: Path) -> Path:
    (path,) = folder.glob("*.pt")
    return path


def bits(tensor: Any) -> list[int]:
    flat = tensor.detach().contiguous().reshape(-1)
    return list(flat.view(torch.uint8).tolist()) if flat.numel() else []


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(type(b) is torch.Tensor and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or a != a)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64),
    *(torch.complex128, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.bool),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_type_and_form_of_tensor(tmp_path: Path, dtype: Any, wait: bool) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (4 * 6 * dtype.itemsize,), dtype=torch.uint8)
    base = raw.view(dtype).reshape(4, 6)  # all bit patterns, NaNs too
    state = {
        "whole": base,
        "0-dim": base[1, 1],
        "empty": base[:0],
        "transposed": base.clone().t(),
        "steps": base.clone()[::2, 1::3],
        "expanded": base.clone()[:1, :1].expand(3, 5),
        "parameter": torch.nn.Parameter(base.clone(), requires_grad=dtype.is_floating_point),
    }
    assert same(
        {name: value.detach() if name == "parameter" else value for name, value in state.items()},
        through(tmp_path, state, wait),
    )


@both
def test_conjugates_negatives_and_results_of_autograd(tmp_path: Path, wait: bool) -> None:
    z = torch.randn(5, dtype=torch.complex64)
    x = torch.randn(3, requires_grad=True)
    state = {"conj": z.conj(), "neg": z.conj().imag, "grown": x * 2, "leaf": x}
    expected = {"conj": z.conj().resolve_conj(), "neg": z.conj().imag.resolve_neg()}
    expected |= {"grown": (x * 2).detach(), "leaf": x.detach()}
    loaded = through(tmp_path, state, wait)
    assert same(expected, loaded)
    assert not any(tensor.requires_grad for tensor in loaded.values())


@both
def test_a_view_takes_only_its_own_bytes(tmp_path: Path, wait: bool) -> None:
    big, other = torch.randn(1000, 1000), torch.randn(1000, 1000)
    state = {"row": big[3], "one": big[7, 7], "part": big[20:22], "column": other[:, 5], "again": other[:, 5]}
    loaded = through(tmp_path, state, wait)
    assert same(state, loaded)
    loaded["column"][3] = 7.0
    assert loaded["again"][3] == 7.0
    assert path_of(tmp_path).stat().st_size < 30_000


@both
def test_an_expanded_tensor_stays_small(tmp_path: Path, wait: bool) -> None:
    one = torch.randn(1).expand(1_000_000)
    loaded = through(tmp_path, {"many": one}, wait)["many"]
    assert loaded.shape == one.shape
    assert loaded.unique().tolist() == [one[0].item()]
    assert path_of(tmp_path).stat().st_size < 5_000


@both
def test_what_is_shared_stays_shared(tmp_path: Path, wait: bool) -> None:
    big = torch.randn(1_000_000)
    weight = big[1000:21_000].view(100, 200)
    state = {
        "embedding": weight,
        "head": weight.view(100, 200),  # tied: another tensor of the same memory
        "again": weight,  # the same tensor
        "half": weight[:50].t(),
        "inside": weight[60:62],  # ends before the next one begins, which the large one spans
        "chained": big[20_000:22_000],  # overlaps with the end of weight only
        "apart": big[500_000:500_100],
    }
    loaded = through(tmp_path, state, wait)
    assert same(state, loaded)
    assert loaded["again"] is loaded["embedding"]
    assert 22_000 * 4 - 1000 * 4 < path_of(tmp_path).stat().st_size < 22_000 * 4 + 5_000
    loaded["embedding"][0, 0] = 77.0
    loaded["embedding"][99, 199] = 78.0
    assert loaded["head"][0, 0] == loaded["half"][0, 0] == 77.0
    assert loaded["head"][99, 199] == loaded["chained"][999] == 78.0
    assert loaded["apart"].untyped_storage().data_ptr() != loaded["head"].untyped_storage().data_ptr()


@both
def test_arrays_that_overlap_without_one_storage(tmp_path: Path, wait: bool) -> None:
    array = np.arange(100, dtype=np.float32)
    state = {"a": torch.from_numpy(array[:60]), "b": torch.from_numpy(array[40:])}
    loaded = through(tmp_path, state, wait)
    assert same(state, loaded)
    loaded["a"][40] = -1.0
    assert loaded["b"][0] == -1.0


def test_views_that_interleave(tmp_path: Path) -> None:
    pairs = torch.randn(50, 2)
    loaded = through(tmp_path, {"x": pairs[:, 0], "y": pairs[:, 1]})
    assert same({"x": pairs[:, 0], "y": pairs[:, 1]}, loaded)


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    tensor = torch.randn(4, 4)
    with torch.device("meta"):
        assert same({"a": tensor, "b": tensor.t()[1:]}, through(tmp_path, {"a": tensor, "b": tensor.t()[1:]}))


def test_values_that_are_no_tensors(tmp_path: Path) -> None:
    shared = [1, 2]
    state: dict[Any, Any] = {
        "numbers": [0, -1, 1 << 31, 1 << 64, -(1 << 2000), 0.1, math.inf, math.nan, -0.0, 1 + 2j, True, False],
        "text": ["", "ä\ud800", "x" * 70_000],
        "nothing": None,
        "bytes": [b"\0\xff", b"a" * 300],
        "empty": [[], (), {}, collections.OrderedDict()],
        "tuples": (1, (2,), (3, 4, 5, 6), [(7, 8)]),
        3: {2.5: "float", True: "bool", None: "none", (1, "a", None): "tuple", b"k": "bytes"},
        "counter": collections.Counter({30: 1, 80: 2}),
        "torch": [torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1")],
        "shared": {"a": shared, "b": shared},
    }
    loaded = through(tmp_path, state)
    assert same(state, loaded)
    assert loaded["shared"]["a"] is loaded["shared"]["b"]
    assert math.copysign(1, loaded["numbers"][8]) == -1


def test_a_list_in_itself(tmp_path: Path) -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    loaded = through(tmp_path, {"cycle": cycle})["cycle"]
    assert loaded[1] is loaded


def test_attributes_of_a_module_state(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    loaded = through(tmp_path, {"model": state})["model"]
    assert type(loaded) is collections.OrderedDict
    assert loaded._metadata == state._metadata
    assert loaded._metadata["1"] == {"version": 2}
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    other.load_state_dict(loaded)
    assert same(dict(other.state_dict()), dict(state))


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "ReduceLROnPlateau": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
        milestones=[2],
    ),
}


@both
@pytest.mark.parametrize("name", SCHEDULERS)
def test_training_goes_on_as_if_never_stopped(tmp_path: Path, name: str, wait: bool) -> None:
    def make() -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        return model, optimizer, SCHEDULERS[name](optimizer), torch.amp.GradScaler("cpu")

    def train(model: Any, optimizer: Any, scheduler: Any, scaler: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step(*([loss.item()] if name == "ReduceLROnPlateau" else []))

    parts = make()
    train(*parts)
    state = {str(at): part.state_dict() for at, part in enumerate(parts)} | {"rng": torch.get_rng_state()}
    with CheckpointFolder(tmp_path) as folder:
        folder.save(3, state, wait=wait)
        train(*parts)
        others = make()
        found = folder.newest()
    assert found is not None
    for at, part in enumerate(others):
        part.load_state_dict(found[1][str(at)])
    torch.set_rng_state(found[1]["rng"])
    train(*others)
    assert same(
        [copy.deepcopy(dict(part.state_dict())) for part in others[:2]],
        [copy.deepcopy(dict(part.state_dict())) for part in parts[:2]],
    )
    assert others[3].state_dict() == parts[3].state_dict()


def test_random_generators(tmp_path: Path) -> None:
    state = dataclasses.asdict(capture_rng())
    assert same(state, through(tmp_path, {"rng": state})["rng"])


# Refusals


class Colour(enum.Enum):
    RED = 1


class Count(int):
    pass


@dataclasses.dataclass
class Config:
    size: int = 3


Pair = collections.namedtuple("Pair", "a b")
REFUSED: dict[str, tuple[Any, str, str]] = {
    "lambda": (lambda: 1, "function", "put it back after loading"),
    "builtin": (print, "builtin_function_or_method", "put it back after loading"),
    "class": (Config, "type", "put it back after loading"),
    "array": (np.zeros(3), "numpy.ndarray", r"torch.from_numpy\(\)"),
    "array-number": (np.longdouble(3), "numpy.longdouble", r"item\(\)"),
    "time": (np.timedelta64(3, "s"), "numpy.timedelta64", r"item\(\)"),
    "set": ({1}, "set", r"sorted\(\)"),
    "bytearray": (bytearray(b"x"), "bytearray", r"bytes\(\)"),
    "no-bytes": (b"", "an empty bytes object", "None"),
    "long": (1 << 2100, "an int of 2101 bits", "string"),
    "defaultdict": (collections.defaultdict(list), "collections.defaultdict", r"dict\(\)"),
    "namedtuple": (Pair(1, 2), "Pair", r"tuple\(\)"),
    "enum": (Colour.RED, "Colour", "its value"),
    "int": (Count(3), "Count", r"int\(\)"),
    "dataclass": (Config(), "Config", r"dataclasses.asdict\(\)"),
    "module": (torch.nn.Linear(1, 1), "Linear", r"state_dict\(\)"),
    "object": (object(), "object", "leave it out"),
    "generator": (torch.Generator(), "Generator", "leave it out"),
    "sparse": (torch.eye(3).to_sparse(), "sparse_coo", r"to_dense\(\)"),
    "meta": (torch.empty(3, device="meta"), "meta", "nothing to save"),
    "subclass": (torch.randn(3).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine", "plain tensor"),
}


@both
@pytest.mark.parametrize("what", REFUSED)
def test_what_could_not_be_read_back_is_refused(tmp_path: Path, what: str, wait: bool) -> None:
    value, kind, advice = REFUSED[what]
    with CheckpointFolder(tmp_path) as folder:
        folder.save(1, {"a": 1})
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ConfigError, match=rf" extra\['scheduler'\]\['lambdas'\]\[0\] is .*{kind}.*{advice}"):
            folder.save(2, {"extra": {"scheduler": {"lambdas": [value]}}}, wait=wait)
        with pytest.raises(ConfigError, match=r" \['a b'\]\[3\]\[1\] is "):
            folder.save(2, {"a b": {3: (1, value)}}, wait=wait)
        folder.wait()
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("value", [np.float64(0.1), np.float32(0.1), np.int64(-3), np.bool_(True), np.complex64(1j)])
def test_numpys_numbers_are_saved_as_pythons(tmp_path: Path, value: Any) -> None:
    with CheckpointFolder(tmp_path) as folder:
        folder.save(1, {"scheduler": {"_last_lr": [value]}})
        found = folder.load(1)["scheduler"]["_last_lr"][0]
    assert type(found) is type(value.item())
    assert found == value


@pytest.mark.parametrize(
    "key", [Colour.RED, Count(3), np.int64(3), torch.zeros(1), frozenset(), (1, print), b"", 1 << 2100]
)
def test_keys_are_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(ConfigError, match=r"a key of extra\['b'\] is a"):
        CheckpointFolder(tmp_path).save(1, {"extra": {"b": {key: 1}}})
    assert list(tmp_path.iterdir()) == []


def test_attributes_are_looked_at(tmp_path: Path) -> None:
    state = collections.OrderedDict(a=1)
    state._metadata = {"hook": print}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r" model\._metadata\['hook'\] is "):
        CheckpointFolder(tmp_path).save(1, {"model": state})


@pytest.mark.parametrize("state", [None, [1], torch.zeros(3), collections.defaultdict(int), torch.nn.Linear(1, 1)])
def test_the_state_must_be_a_dict(tmp_path: Path, state: Any) -> None:
    with pytest.raises(ConfigError, match="give a dict"):
        CheckpointFolder(tmp_path).save(1, state)


def test_too_deep(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested more than 100 deep"):
        CheckpointFolder(tmp_path).save(1, {"deep": deep})
    for _ in range(10_000):  # freeing it recurses, too
        deep = deep[0]


@both
def test_two_types_in_one_memory(tmp_path: Path, wait: bool) -> None:
    tensor = torch.randn(4)
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"a\['x'\] \(torch.float32\) and b \(torch.int32\) are two types.*clone\(\)"):
        folder.save(1, {"a": {"x": tensor}, "b": tensor.view(torch.int32)}, wait=wait)
    assert list(tmp_path.iterdir()) == []
