"""What a program may expect of operations on an accelerator's tensors: they keep to its streams, as those of NCCL do.

On the CPU, where all this holds by itself, the same programs only show that they are right.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ftcomm
import ftcomm.torch

SLOW = 50_000_000  # cycles, some 30 ms


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def slowly() -> None:
    """What the current stream is given from now on is late."""
    if on_gpu():
        torch.cuda._sleep(SLOW)


def side_stream():
    return torch.cuda.stream(torch.cuda.Stream()) if on_gpu() else contextlib.nullcontext()


def follows_the_stream(context):
    """Inputs that a stream has yet to compute, results that it goes on with, and no word to the device between."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, size + 1))
    for _ in range(3):
        with side_stream():
            slowly()
            t = torch.full((100_000,), float(rank + 1))
            dist.all_reduce(t)
            doubled = t * 2
            slowly()
            out = torch.zeros(size * 1000)
            dist.all_gather_into_tensor(out, torch.full((1000,), float(rank)))
            assert bool((doubled == 2 * total).all())
            assert out.view(size, 1000)[:, 0].tolist() == [float(r) for r in range(size)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_operations_follow_the_current_stream(world, device, transport):
    world(2, follows_the_stream, device=device, transport=transport)


def at_once(context):
    """Copies from the device are made beside the program's stream, whatever it still has to do; who asks waits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1 << 20))  # pinned memory is there
    t, other = torch.full((1 << 20,), float(rank + 1)), torch.zeros(1 << 20)
    if on_gpu():
        torch.cuda.synchronize()
        torch.cuda._sleep(20 * SLOW)
        before = torch.cuda.Event()
        before.record()
    works = [dist.isend(t.clone(), 1 - rank), dist.irecv(other, 1 - rank), dist.all_reduce(t, async_op=True)]
    if on_gpu():
        assert not before.query(), "a call has waited for the device"
    for work in works:
        work.wait()
    assert bool((other == 2 - rank).all())
    assert bool((t == size * (size + 1) // 2).all())


@pytest.mark.parametrize("policy", ["raise", "replay"])
def test_calls_do_not_wait_for_the_device(world, device, policy):
    world(2, at_once, device=device, policy=policy)


def uneven(context):
    """The ranks' parts differ in size: each is told by its rank, which copies its own into the output first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        with side_stream():
            outputs = [torch.full((1000 * (r + 1),), -1.0) for r in range(size)]
            slowly()
            own = torch.full((1000 * (rank + 1),), float(10 * step + rank))
            dist.all_gather(outputs, own)
            assert [out.unique().tolist() for out in outputs] == [[10.0 * step + r] for r in range(size)]


def test_uneven_parts(world, device):
    world(3, uneven, device=device)


def many_at_once(context):
    """The allocator gets the memory back as soon as the program has dropped its tensors, and may hand it out again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    works, kept = [], []
    slowly()
    for number in range(40):
        t = torch.full((50_000,), float(number * (rank + 1)))
        works.append(dist.all_reduce(t, async_op=True))
        if number % 3 == 0:
            kept.append((number, t))
        del t
        torch.full((50_000,), -1.0)  # where the dropped one was
    for work in works:
        work.wait()
    for number, t in kept:
        assert bool((t == number * size * (size + 1) // 2).all()), number
    # Nobody waits at all.
    dist.all_reduce(t := torch.ones(7), async_op=True)
    del t
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_many_operations_at_once(world, device, size):
    world(size, many_at_once, device=device)


def mixed(context):
    """Operations of both kinds in one group are in the order of the calls, whatever is ready first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(10):
        works, tensors = [], []
        for number in range(6):
            where = "cpu" if (number + step) % 2 else torch.get_default_device()
            slowly()
            tensors.append(torch.full((100 + number,), float(rank + number), device=where))
            works.append(dist.all_reduce(tensors[-1], async_op=True))
        for number, (work, t) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            assert bool((t == size * number + size * (size - 1) // 2).all())


def test_device_and_host_in_turn(world, device):
    world(3, mixed, device=device)


def futures(context):
    size = dist.get_world_size()
    with side_stream():
        slowly()
        chained = dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda f: f.value()[0] * 3)
        assert bool((chained.wait() == 3 * size).all())
        with dist._coalescing_manager(device=torch.get_default_device(), async_ops=True) as manager:
            many = [torch.ones(100 * (r + 1)) for r in range(3)]
            for t in many:
                dist.all_reduce(t)
        manager.wait()
        assert all(bool((t == size).all()) for t in many)
        with dist._coalescing_manager(device=torch.get_default_device(), async_ops=True) as manager:
            dist.all_reduce(many[0])
            dist.all_reduce(many[1])
        together = manager.works[0].get_future().wait()
        assert [t.numel() for t in together] == [100, 200]
        assert all(bool((t == size * size).all()) for t in together)


def test_futures(world, device):
    world(2, futures, device=device)


def sparse(context):
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        with side_stream():
            slowly()
            index = torch.tensor([[rank, size]])
            t = torch.sparse_coo_tensor(index, torch.full((2, 500), float(step + 1)), (size + 1, 500))
            work = dist.all_reduce(t, async_op=True)
            if step == 1:
                work.get_future().wait()  # another thread has finished it
            work.wait()
            found = t.to_dense()
            del t, work
            assert found[:, 0].tolist() == [step + 1.0] * size + [size * (step + 1.0)]


def test_sparse(world, device):
    world(3, sparse, device=device)


def messages(context):
    rank = dist.get_rank()
    with side_stream():
        for number in range(5):
            slowly()
            if rank == 0:
                dist.send(torch.full((10_000 * number + 1,), float(number)), 1)
            else:
                t = torch.zeros(10_000 * number + 1)
                dist.recv(t, 0)
                assert bool((t == number).all())
    if rank == 1:
        short = torch.zeros(3)
        with pytest.raises(dist.DistBackendError, match="sizes and types"):
            dist.recv(short, 0)
    else:
        dist.send(torch.ones(2), 1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_messages(world, device, transport):
    world(2, messages, device=device, transport=transport)


def refused(context):
    here = torch.ones(4)
    if on_gpu():
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        outputs = [torch.zeros(4), torch.zeros(4, device="cpu")]
        with pytest.raises(RuntimeError, match="different devices"):
            backend.allgather([outputs], [here]).wait()
        with pytest.raises(RuntimeError, match="different devices"):
            backend.allreduce_coalesced([here, torch.ones(4, device="cpu")]).wait()
        with pytest.raises(ftcomm.ConfigError, match="CPU tensors"):
            ftcomm.torch.communicator().all_reduce(here)
    dist.all_reduce(here)
    assert here.tolist() == [2.0] * 4


def test_what_is_refused(world, device):
    world(2, refused, device=device)


def captured(context):
    """A replayed graph would not call the library: it has to say so."""
    dist.all_reduce(t := torch.ones(4))
    if on_gpu():
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph):
            dist.all_reduce(t)
        torch.cuda.synchronize()
    dist.all_reduce(t)
    assert t.tolist() == [4.0] * 4


def test_capture_into_a_graph(world, device):
    world(2, captured, device=device)


def captures_meanwhile(context, how):
    """What the library does for an operation called before does not spoil a graph captured meanwhile, in the strictest mode."""
    dist.all_reduce(torch.ones(1000))
    if dist.get_rank() == 1:
        context.hold()
        dist.all_reduce(t := torch.full((1000,), 2.0))
        assert bool((t == 3).all())
        return
    t = torch.full((1000,), 1.0)
    x, y, graph = torch.ones(8), torch.zeros(8), None
    if on_gpu():
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda._sleep(20 * SLOW)  # until well after the beginning of the capture, which waits for nothing itself
    work = dist.all_reduce(t, async_op=True)
    ended = []
    if how == "future":  # it is finished by a thread of the library, in the capture
        work.get_future().then(lambda _: ended.append(True))
    with torch.cuda.stream(stream) if graph else contextlib.nullcontext():
        if graph:
            graph.capture_begin(capture_error_mode="global")
        y.copy_(x * 2)
        context.mark("capturing")
        context.hold()  # the other rank has the result, so this one's lane has posted its part
        if graph:
            for waits in (work.wait, work.is_completed):
                with pytest.raises(dist.DistBackendError, match="captured into a graph"):
                    waits()
        y.add_(1)
        if graph:
            graph.capture_end()
    work.wait()
    assert bool((t == 3).all())
    if graph:
        x.fill_(4.0)
        graph.replay()
        assert y.tolist() == [9.0] * 8


@pytest.mark.parametrize("how", ["wait", "future"])
def test_capture_while_an_operation_waits(world, device, how):
    group = world.start(2, lambda context: captures_meanwhile(context, how), device=device)
    group.wait_for(0, "capturing")
    group.release(1)
    group.wait_ended(1)
    group.release(0)
    world.values(group)


def given_up(context):
    """Who does not wait any longer for its device has its tensors for other things: no late result comes into them."""
    dist.all_reduce(torch.ones(3))
    t = torch.full((1000,), 1.0)
    if dist.get_rank() == 0 and on_gpu():
        torch.cuda._sleep(20 * SLOW)
        work = dist.all_reduce(t, async_op=True)
        with pytest.raises(dist.DistBackendError, match="device has not come to it"):
            work.wait(timedelta(milliseconds=50))
        t.fill_(7)
        with pytest.raises(dist.DistBackendError):
            work.wait()
        torch.cuda.synchronize()
        assert bool((t == 7).all())
    elif on_gpu():
        with contextlib.suppress(dist.DistBackendError):  # the ranks vote on it
            dist.all_reduce(t)
        assert t.unique().tolist() in ([1.0], [2.0])


def test_a_wait_that_is_given_up(world, device):
    world(2, given_up, device=device)


def large(context):
    """Pinned memory comes from the device's driver, and the ranks of a host read each other's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    count = (16 << 20) // 4 + 5
    for step in range(3):
        t = torch.full((count,), float(rank + step))
        dist.all_reduce(t)
        assert bool((t == sum(range(size)) + size * step).all())
    out = torch.zeros(size, count)
    dist.all_gather_into_tensor(out, torch.full((count,), float(rank)))
    assert [row.unique().tolist() for row in out] == [[float(r)] for r in range(size)]
    assert not ftcomm.torch.communicator().stats()["reads_refused"]


@pytest.mark.parametrize("policy", ["raise", "replay"])
def test_large_operations(world, device, policy):
    world(2, large, device=device, policy=policy)


def kept_for_a_second_try(context):
    """An operation that failed has left its input as it was (invariant B), also when its copies were under way."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        context.die()
    slowly()
    with pytest.raises(dist.DistBackendError) as caught:
        while True:
            t = torch.full((1 << 18,), float(rank))
            dist.all_reduce(t)
    assert isinstance(caught.value.__cause__, ftcomm.PeerFailure)
    assert bool((t == rank).all())
    dist.shrink_group([1])
    dist.all_reduce(t)
    assert bool((t == 2).all())


def test_input_of_a_failed_operation(world, device):
    world(3, kept_for_a_second_try, dies=(1,), device=device)


def polled(context):
    """Who has seen that it is completed uses the result without a word more."""
    size = dist.get_world_size()
    with side_stream():
        for _ in range(3):
            slowly()
            work = dist.all_reduce(t := torch.ones(1 << 20), async_op=True)
            while not work.is_completed():
                pass
            assert bool((t == size).all())


def test_polling(world, device):
    world(2, polled, device=device)


def several_kinds(context):
    """In one coalesced block: the future of the block is that of all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with side_stream():
        slowly()
        big, own, other = torch.full((1 << 20,), float(rank)), torch.full((9,), float(rank)), torch.zeros(9)
        parts = [torch.zeros(5) for _ in range(size)]
        backend = dist.group.WORLD._get_backend(torch.get_default_device())
        backend._start_coalescing()
        backend.broadcast([big], dist.BroadcastOptions())
        backend.allgather([parts], [torch.full((5,), float(rank))])
        backend.send([own], 1 - rank, 0)
        backend.recv([other], 1 - rank, 0)
        found = backend._end_coalescing().get_future().then(lambda f: [t.clone() for t in f.value()])
        found.wait()
        assert bool((big == 0).all())
        assert [part[0].item() for part in parts] == [float(r) for r in range(size)]
        assert bool((other == 1 - rank).all())


def test_a_block_of_several_kinds(world, device):
    world(2, several_kinds, device=device)


def with_direct_calls(context):
    """The group's communicator waits for its turn, also where the group's operations wait for a device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    comm = ftcomm.torch.communicator()
    for number in range(6):
        if rank == number % size:
            slowly()
        work = dist.all_reduce(t := torch.full((1000,), float(number)), async_op=True)
        mine = torch.full((1000,), 100.0 + number, device="cpu")
        comm.all_reduce(mine)
        assert bool((mine == size * (100 + number)).all())
        work.wait()
        assert bool((t == size * number).all())


def test_direct_calls_in_between(world, device):
    world(3, with_direct_calls, device=device)


def after_the_end(context):
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    backend = group._get_backend(torch.get_default_device())
    dist.destroy_process_group(group)
    for _ in range(3):
        with pytest.raises(dist.DistBackendError, match="closed"):
            backend.allreduce([torch.ones(3)]).wait()
    del backend
    dist.all_reduce(t := torch.ones(3))
    assert t.tolist() == [2.0] * 3


def test_a_group_that_is_closed(world, device):
    world(2, after_the_end, device=device)


def closed_meanwhile(context):
    """The device has not come to it, and may never come: the group can be left all the same, and the wait ends."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    if not on_gpu():
        return
    torch.cuda._sleep(40 * SLOW)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    dist.destroy_process_group(group)
    with pytest.raises(dist.DistBackendError, match="closed"):
        work.wait()


def test_closed_before_the_device_comes_to_it(world, device):
    world(2, closed_meanwhile, device=device)


def too_short(context):
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    else:
        t = torch.full((5,), 7.0)
        with pytest.raises(dist.DistBackendError, match="sizes and types"):
            dist.recv(t, 0)
        if on_gpu():
            assert t.tolist() == [7.0] * 5


def test_nothing_is_copied_of_what_failed(world, device):
    world(2, too_short, device=device)


def uneven_columns(context):
    """As in uneven(), of several tensors at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with side_stream():
        slowly()
        inputs = [torch.full((4,), float(rank)), torch.full((1000 * (rank + 1),), 10.0 + rank)]
        outputs = [[torch.zeros(4), torch.full((1000 * (r + 1),), -1.0)] for r in range(size)]
        backend = dist.group.WORLD._get_backend(torch.get_default_device())
        backend.allgather_coalesced(outputs, inputs).wait()
        assert [[t.unique().tolist() for t in row] for row in outputs] == [[[r], [10.0 + r]] for r in range(size)]


def test_uneven_columns(world, device):
    world(3, uneven_columns, device=device)
