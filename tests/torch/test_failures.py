"""Errors reach every rank through the Work, with their cause; and what goes on afterwards."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftcomm
import ftcomm.torch


def mistakes(context):
    rank = dist.get_rank()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    base = torch.ones(4, 4)
    meta = torch.ones(3, device="meta")
    cases = [
        (lambda: dist.all_reduce(base.t()[1:]), "non-contiguous"),
        (lambda: backend.broadcast([torch.ones(3).to_sparse()]).wait(), "to_dense"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(4)), "elements"),
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX), "complex|Complex"),
        (lambda: backend.allreduce([meta]).wait(), "meta|Meta"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [3, 1]), "add up|split"),
    ]
    for call, text in cases:
        with pytest.raises((RuntimeError, ValueError), match=text):
            call()
    # Mistakes of the caller come through the Work: nothing is thrown by the call.
    work = dist.all_reduce(base.t(), async_op=True)
    with pytest.raises(dist.DistBackendError, match="contiguous") as caught:
        work.wait()
    assert isinstance(caught.value.__cause__, ftcomm.ConfigError)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError, match="contiguous"):
        work.get_future().wait()
    with pytest.raises(dist.DistBackendError):
        work.wait()  # as often as one likes
    dist.all_reduce(t := torch.ones(2))
    assert t[0] == 2
    assert rank == backend.rank()


def test_mistakes(world, device):
    world(2, mistakes, device=device)


def mismatch(context):
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(10 + dist.get_rank()))
    assert isinstance(caught.value.__cause__, ftcomm.Mismatch)
    assert caught.value.__cause__.ranks == (1,)


def test_mismatch(world, device):
    world(2, mismatch, device=device)


def late(context):
    dist.barrier()
    # A group of its own: the job's timeout holds for its start, too, where a loaded machine may need longer.
    impatient = dist.new_group(timeout=timedelta(seconds=5))
    dist.barrier()
    if dist.get_rank() == 2:
        context.mark("there")
        context.hold()
        return
    with pytest.raises(dist.DistBackendError, match=r" (Timed out|closed|timeout) ") as caught:
        dist.all_reduce(torch.ones(3), group=impatient)
    error = caught.value.__cause__
    assert isinstance(error, ftcomm.Timeout)
    assert error.missing == (2,)
    context.mark("timed out")


def test_timeout_names_the_missing(world):
    group = world.start(3, late)
    for rank in (0, 1):
        group.wait_for(rank, "timed out")
    group.release(2)
    world.values(group)


def killed_under_raise(context):
    if dist.get_rank() == 1:
        context.die()
    with pytest.raises(dist.DistBackendError, match="1") as caught:
        for _ in range(100):
            dist.all_reduce(torch.ones(100_000))
    error = caught.value.__cause__
    assert isinstance(error, ftcomm.PeerFailure)
    assert error.ranks == (1,)
    assert error.evidence
    assert error.operation
    dist.shrink_group([1])
    dist.all_reduce(t := torch.ones(1000))
    assert dist.get_world_size() == 3
    assert bool((t == 3).all())
    half = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(t := torch.ones(1), group=half)
        assert t.item() == 2
    return dist.get_rank()


def ddp_on_the_shrunk(context, sub):
    before = dist.new_group([0, 1, 2]) if sub else None
    if context.rank == 1:
        context.die()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(4), group=before)
    group = dist.shrink_group([1], group=before)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False), process_group=group)
    model(torch.full((1, 3), context.rank + 1.0)).sum().backward()
    return group.name(), model.module.weight.grad.tolist()


@pytest.mark.parametrize("sub", [False, True])
def test_a_new_ddp_on_a_shrunk_group(world, sub):
    """Torch takes its backend for gloo's, and DDP reads the name of such a one from its memory."""
    values = world(3, lambda context: ddp_on_the_shrunk(context, sub), dies=(1,), policy="raise")
    assert values[0] == values[2] == ("custom", [[2.0] * 3])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_raise_and_shrink(world, device, transport):
    values = world(4, killed_under_raise, dies=(1,), transport=transport, device=device)
    assert [values[r] for r in (0, 2, 3)] == [0, 1, 2]


def killed_while_receiving_from_anyone(context):
    rank = dist.get_rank()
    if rank > 0:
        context.mark("there")
        context.hold()
        dist.send(torch.full((3,), float(rank)), 0)
        return
    got, late = torch.zeros(3), torch.zeros(3)
    work = dist.irecv(got)
    seen = work.get_future()
    context.mark("posted")
    for wait in (work.wait, seen.wait, lambda: dist.recv(late)):
        with pytest.raises(dist.DistBackendError, match="ack_failed") as caught:
            wait()
        error = caught.value.__cause__
        assert isinstance(error, ftcomm.PeerFailure)
        assert error.ranks == (2,)
        assert error.evidence
    ftcomm.torch.communicator().ack_failed()
    context.mark("acknowledged")
    assert dist.recv(late) == 1
    assert late.tolist() == [1.0] * 3


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_receive_from_anyone(world, transport):
    group = world.start(3, killed_while_receiving_from_anyone, transport=transport)
    for rank in (1, 2):
        group.wait_for(rank, "there")
    group.wait_for(0, "posted")
    group.kill(2)
    group.wait_for(0, "acknowledged")
    group.release(1)
    world.values(group, dies=(2,))


def killed_in_backward(context):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    for step in range(3):
        if step == 2 and dist.get_rank() == 2:
            context.die()
        try:
            model(torch.ones(2, 64)).sum().backward()
        except dist.DistBackendError as error:
            assert isinstance(error.__cause__, ftcomm.PeerFailure)
            assert error.__cause__.ranks == (2,)
            assert step == 2
            break
    else:
        raise AssertionError("the death went unnoticed")
    dist.shrink_group([2])
    model._update_process_group(dist.group.WORLD)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 64)).sum().backward()


def test_ddp_backward_under_raise(world, device):
    world(3, killed_in_backward, dies=(2,), device=device)


def killed_in_mid_all_reduce(context):
    rank = dist.get_rank()
    for step in range(5):
        work = dist.all_reduce(t := torch.full((1 << 18,), float(rank + 1)), dist.ReduceOp.AVG, async_op=True)
        work.wait()
        outcome = ftcomm.torch.outcome(work)
        for offset, count, contributors in outcome.chunks:
            expected = sum(r + 1 for r in contributors) / len(contributors)
            part = t[offset : offset + count]
            torch.testing.assert_close(part, torch.full_like(part, expected))
        if step == 4:
            assert outcome.contributors == (0, 1, 3)
    comm = ftcomm.torch.communicator()
    assert comm.alive == (0, 1, 3)
    dist.barrier()
    return [outcome.contributors, t[:3].tolist()]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_lossy_in_mid_all_reduce(world, device, transport):
    faults = "rank=2,at=collective.part:10,do=kill"
    how = {"policy": "lossy", "faults": faults, "transport": transport, "device": device}
    values = world(4, killed_in_mid_all_reduce, dies=(2,), **how)
    assert values[0] == values[1] == values[3]


def lossy_ddp(context):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, ftcomm.torch.lossy_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        if step == 3 and dist.get_rank() == 0:  # rank 0: DDP broadcasts buffers and bucket order from it
            context.die()
        torch.manual_seed(step)
        model(torch.randn(8, 32)).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    single = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
    single.load_state_dict(net.state_dict())
    assert all(bool(g.isfinite().all()) for g in grads)
    return [p.detach().flatten()[:5].tolist() for p in net.parameters()]


def test_lossy_ddp_without_rank_0(world, device):
    values = world(3, lossy_ddp, dies=(0,), policy="lossy", device=device)
    assert values[1] == values[2]


def aborted(context):
    group = dist.group.WORLD
    if dist.get_rank() == 0:
        dist.all_reduce(t := torch.ones(2))
        group._get_backend(torch.device("cpu")).abort()
    else:
        dist.all_reduce(t := torch.ones(2))
    assert t[0] == 2
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(t)
        dist.all_reduce(t)
    assert isinstance(caught.value.__cause__, ftcomm.Revoked)


def test_abort_revokes(world, device):
    world(2, aborted, device=device)


def closed(context):
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=pair)
    backend = pair._get_backend(torch.device("cpu"))
    dist.destroy_process_group(pair)
    with pytest.raises(dist.DistBackendError, match="closed"):
        backend.barrier(dist.BarrierOptions()).wait()
    dist.barrier()


def test_closed_group(world):
    world(2, closed)
