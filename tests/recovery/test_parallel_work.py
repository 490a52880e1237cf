"""The parts of parallel replay that need no job: values as bytes, the share of work and its sum, a helper's answers."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.distributed.pipelining import schedules  # noqa: E402

import ftcomm  # noqa: E402
from ftcomm.recovery.engine.lines import Line  # noqa: E402
from ftcomm.recovery.engine.message import Packed, join, pack, split, unpack  # noqa: E402
from ftcomm.recovery.engine.parallel import recovery  # noqa: E402
from ftcomm.recovery.engine.parallel import service as service_module  # noqa: E402
from ftcomm.recovery.engine.parallel.helpers import AT_ONCE, Helpers  # noqa: E402
from ftcomm.recovery.engine.parallel.service import Service  # noqa: E402
from ftcomm.recovery.engine.parallel.work import Done, Item, add, compute, parts, settings  # noqa: E402


def again(value: Any) -> Any:
    structure, tensors = pack(value)
    return unpack(Packed(structure, split(*join(tensors))))


def strided(kind: str) -> Tensor:
    whole = torch.arange(96.0).reshape(8, 12)
    return {
        "plain": whole,
        "row": whole[3:5],  # begins in the middle of a cache line
        "columns": whole[:, 1:5],
        "transposed": whole.t(),
        "expanded": whole[0, :1].expand(5, 7),
        "nothing": whole[:0],
        "number": torch.tensor(2.5),
        "half": whole.bfloat16()[1:],
        "whole numbers": whole.long(),
        "flags": whole > 3,
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["plain", "row", "columns", "transposed", "expanded", "nothing", "number", "half", "whole numbers", "flags"],
)
def test_tensors_arrive_as_they_are(kind: str) -> None:
    sent = strided(kind)
    _, got = again([torch.ones(3), sent])
    assert got.dtype == sent.dtype
    assert torch.equal(got, sent)
    if sent.numel() > 1:
        assert got.stride() == sent.stride()
        assert got.data_ptr() % 64 == sent.data_ptr() % 64


def test_a_module_arrives_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    module[2].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    module[1].eval()
    got = again(module)
    assert got[2].weight is got[0].weight
    assert not got[0].bias.requires_grad
    assert not got[1].training
    assert module[0].weight.data_ptr() != got[0].weight.data_ptr()
    for name, value in module.state_dict().items():
        assert torch.equal(got.state_dict()[name], value)


def test_what_cannot_be_sent() -> None:
    with pytest.raises(Exception, match="sparse"):
        pack([torch.eye(3).to_sparse()])
    with pytest.raises(Exception, match="lambda"):
        pack(lambda: None)


@pytest.mark.parametrize(("count", "hands", "sizes"), [(8, 4, [2, 2, 2, 2]), (7, 3, [3, 2, 2]), (2, 3, [1, 1, 0])])
def test_parts(count: int, hands: int, sizes: list[int]) -> None:
    found = parts(count, hands)
    assert [len(part) for part in found] == sizes
    assert sorted(n for part in found for n in part) == list(range(count))


def stage() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))


def items(count: int) -> list[Item]:
    torch.manual_seed(4)
    return [Item((torch.randn(5, 7).mul(10.0 ** (n - 6)),), {}, (torch.randn(5, 7),)) for n in range(count)]


def test_gradients_are_those_of_training() -> None:
    """Of different sizes, so that another order of the sum would have other bits; and onto what is there."""
    trained, shared = stage(), stage()
    for _ in range(2):
        for item in items(6):
            trained(item.args[0]).backward(item.gradients[0])
        for done in [compute(shared, None, item) for item in items(6)]:
            add(shared, done)
    for one, other in zip(trained.parameters(), shared.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def computed(helpers: Helpers, module: nn.Module, those: list[Item], wrong: Any = lambda item, done: "") -> list[Done]:
    return list(helpers.compute(module, None, those, pack((module, None)), wrong))


class FakeJob:
    """What services and helpers need of a job."""

    options = SimpleNamespace(secret=None)
    instance = "fake"

    def __init__(self, rank: int, values: dict[str, bytes]) -> None:
        self.rank, self.incarnation = rank, 0
        self.store = SimpleNamespace(get=values.get, set=values.__setitem__)
        self.told: list[Any] = []

    def alive(self) -> tuple[int, ...]:
        return (0, 1, 2)

    def emit(self, event: str, **more: Any) -> None:
        self.told.append((event, *more.values()))


@pytest.fixture
def jobs() -> Iterator[list[FakeJob]]:
    values: dict[str, bytes] = {}
    before = {*threading.enumerate()}
    yield [FakeJob(rank, values) for rank in range(3)]
    assert {*threading.enumerate()} <= before


def test_helpers_compute(jobs: list[FakeJob]) -> None:
    services = [Service(job, lambda: False) for job in jobs[1:]]  # type: ignore[arg-type]
    helpers = Helpers(jobs[0], 4)  # type: ignore[arg-type]
    module = stage()
    for factor in (1.0, 0.5):  # the parameters are those of the step
        with torch.no_grad():
            module[0].weight.mul_(factor)
        done = computed(helpers, module, items(7))
        for found, item in zip(done, items(7), strict=True):
            for one, other in zip(found.gradients, compute(module, None, item).gradients, strict=True):
                assert torch.equal(one, other)
    assert [helper.micro_batches for helper in helpers.all] == [4, 4]
    helpers.close()
    for service in services:
        service.close()
    assert [[event[:3] for event in job.told] for job in jobs] == [[], *[[("helping", 0), ("helped", 0, 4)]] * 2]


def test_helpers_that_refuse_or_go(jobs: list[FakeJob]) -> None:
    busy = Service(jobs[1], lambda: True)  # type: ignore[arg-type]
    gone = Service(jobs[2], lambda: False)  # type: ignore[arg-type]
    helpers = Helpers(jobs[0], 4)  # type: ignore[arg-type]
    module = stage()
    assert len(computed(helpers, module, items(4))) == 4
    gone.close()
    done = computed(helpers, module, items(4))
    for found, item in zip(done, items(4), strict=True):
        assert torch.equal(found.gradients[0], compute(module, None, item).gradients[0])
    assert "it does steps again itself" in helpers.all[0].why
    assert [helper.micro_batches for helper in helpers.all] == [0, 2]
    helpers.close()
    busy.close()


def test_a_forked_child_keeps_nothing_open(jobs: list[FakeJob]) -> None:
    """As a DataLoader's worker that outlives its rank."""
    service = Service(jobs[1], lambda: False)  # type: ignore[arg-type]
    port = service._server.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        here, there = Line(socket.create_connection(server.getsockname())), Line(server.accept()[0])
    context = multiprocessing.get_context("fork")
    begun, ended = context.Event(), context.Event()
    child = context.Process(target=lambda: (begun.set(), ended.wait()))
    child.start()
    try:
        begun.wait()
        here.socket.settimeout(30.0)
        there.close()
        assert here.socket.recv(1) == b""
        service.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert child.is_alive()
    finally:
        ended.set()
        child.join()
        here.close()


UNFINISHED = """
import os

from test_parallel_work import FakeJob, Helpers, Service, computed, items, stage

def loop(write=os.write):  # its own: from Python 3.13 on this runs when names of modules are gone, sys.stdout too
    values = {}
    service = Service(FakeJob(1, values), lambda: False)
    helpers = Helpers(FakeJob(0, values), 4)
    try:
        computed(helpers, stage(), items(4))
        yield
    finally:
        helpers.close()
        service.close()
        write(1, b"closed\\n")

steps = loop()
next(steps)
"""


def test_a_loop_that_is_never_ended() -> None:
    """Its generator is finalised with the interpreter, whose other threads run no more."""
    run = subprocess.run(
        [sys.executable, "-c", UNFINISHED],
        check=False,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "closed\n", "")


def test_results_are_compared(jobs: list[FakeJob]) -> None:
    """A helper's that is wrong is computed here; this process's own is what nothing can be done about."""
    services = [Service(job, lambda: False) for job in jobs[1:]]  # type: ignore[arg-type]
    helpers = Helpers(jobs[0], 4)  # type: ignore[arg-type]
    module, asked = stage(), items(6)
    wrong_ones = iter(["", "it is another one"])  # of the first helper, which has the second and the fifth

    def wrong(item: Item, done: Done) -> str:
        return next(wrong_ones, "") if item is asked[1] or item is asked[4] else ""

    assert len(computed(helpers, module, asked, wrong)) == 6
    assert [helper.why for helper in helpers.all] == ["it computes something else: it is another one", ""]
    assert [helper.micro_batches for helper in helpers.all] == [1, 2]
    with pytest.raises(ftcomm.ReplayDiverged, match=r"Micro-batch 0 .*: it is not"):
        computed(helpers, module, asked, lambda item, done: "it is not")
    helpers.close()
    for service in services:
        service.close()


def test_few_results_are_kept(jobs: list[FakeJob], monkeypatch: pytest.MonkeyPatch) -> None:
    """However much faster the helpers are: here they are through before the second result is asked for."""
    through, real = threading.Semaphore(0), service_module.compute

    def counted(*args: Any) -> Done:
        done = real(*args)
        through.release()
        return done

    monkeypatch.setattr(service_module, "compute", counted)
    services = [Service(job, lambda: False) for job in jobs[1:]]  # type: ignore[arg-type]
    helpers = Helpers(jobs[0], 4)  # type: ignore[arg-type]
    module = stage()
    done = helpers.compute(module, None, items(13), pack((module, None)), lambda item, done: "")
    next(done)
    for _ in range(8):  # the other five are this process's own
        through.acquire()
    kept = [[helper._answers.qsize() for helper in helpers.all] for _ in done]
    assert len(kept) == 12
    assert max(max(sizes) for sizes in kept) <= AT_ONCE
    assert [helper.micro_batches for helper in helpers.all] == [4, 4]
    helpers.close()
    for one in services:
        one.close()


def test_who_replays_alone_has_no_time(jobs: list[FakeJob], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its log holds no more."""
    left = [True]
    monkeypatch.setattr(recovery, "ahead_of", lambda comm: SimpleNamespace(anything=left[0]))
    several = object.__new__(schedules.ScheduleInterleaved1F1B)  # which is not shared
    comm: Any = SimpleNamespace(rank=0, _job=jobs[0])
    with recovery.ParallelReplay(several, stage(), comm).around():
        assert "step" not in vars(several)
        for refused in (True, False):
            left[0] = refused
            helpers = Helpers(jobs[1], 4)  # type: ignore[arg-type]
            helpers.all[0].settled.wait()
            assert helpers.all[0].why == ("it does steps again itself" if refused else "")
            helpers.close()


def test_other_settings_are_refused(jobs: list[FakeJob], monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(jobs[1], lambda: False)  # type: ignore[arg-type]
    before = torch.get_default_dtype()
    helpers = Helpers(jobs[0], 4)  # type: ignore[arg-type]
    helpers.all[0].settled.wait()
    helpers.close()
    assert helpers.all[0].why == ""
    torch.set_default_dtype(torch.float64)
    try:
        other = settings()
    finally:
        torch.set_default_dtype(before)
    # The service asks for its own in a thread of this process, whenever that comes to run.
    monkeypatch.setattr("ftcomm.recovery.engine.parallel.helpers.settings", lambda: other)
    helpers = Helpers(jobs[0], 4)  # type: ignore[arg-type]
    helpers.all[0].settled.wait()
    assert "default dtype" in helpers.all[0].why
    helpers.close()
    service.close()


def test_a_stranger_gets_nothing(jobs: list[FakeJob]) -> None:
    """Who does not know the secret is let go, and the service goes on; a pickle of a stranger would be a program."""
    service = Service(jobs[1], lambda: False)  # type: ignore[arg-type]
    values = jobs[0].store.get("ftcomm/fake/parallel-replay/1")
    jobs[0].store.set("ftcomm/fake/parallel-replay/1", values.replace(b'"secret": "', b'"secret": "00'))
    helpers = Helpers(jobs[0], 4)  # type: ignore[arg-type]
    helpers.all[0].settled.wait()
    assert "AuthenticationError" in helpers.all[0].why
    helpers.close()
    jobs[0].store.set("ftcomm/fake/parallel-replay/1", values)
    helpers = Helpers(jobs[0], 4)  # type: ignore[arg-type]
    helpers.all[0].settled.wait()
    assert helpers.all[0].ready
    helpers.close()
    service.close()
