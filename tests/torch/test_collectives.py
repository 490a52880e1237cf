"""Every collective against gloo, in the same processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

SIZES = [0, 1, 7, 1000, 70_001]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]


def data(rank: int, count: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Small whole numbers, so that every order of additions gives the same bits."""
    values = (torch.arange(count) * 7 + rank * 3 + shift) % 5
    return values.to(dtype)


def both(fn) -> None:
    """fn(group, rank, size) for ftcomm and for gloo; what it returns (tensors) must be equal."""
    gloo = dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ours = fn(dist.group.WORLD, rank, size)
    with torch.device("cpu"):  # gloo has not everything for others
        theirs = fn(gloo, rank, size)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.cpu(), b), (a, b)


def reductions(group, rank, size):
    out = []
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    for dtype in [torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8]:
        for op in ops:
            for count in SIZES if op == dist.ReduceOp.SUM else [7]:
                t = data(rank, count, dtype)
                dist.all_reduce(t, op, group=group)
                out.append(t)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        t = data(rank, 100, torch.int32)
        dist.all_reduce(t, op, group=group)
        out.append(t)
    for root in range(size):
        t = data(rank, 1000, torch.float32, root)
        dist.reduce(t, root, group=group)
        if rank == root:
            out.append(t)
    return out


def movement(group, rank, size):
    out = []
    for dtype in FLOATS[:3] + INTEGERS:
        for count in SIZES[1:4]:
            for root in range(size):
                t = data(rank, count, dtype, root)
                dist.broadcast(t, root, group=group)
                out.append(t)
            mine = data(rank, count, dtype)
            gathered = [torch.zeros(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(gathered, mine, group=group)
            out += gathered
            flat = torch.zeros(size * count, dtype=dtype)
            dist.all_gather_into_tensor(flat, mine, group=group)
            out.append(flat)
    root = size - 1
    mine = data(rank, 33, torch.float32)
    parts = [torch.zeros(33) for _ in range(size)] if rank == root else None
    dist.gather(mine, parts, root, group=group)
    out += parts or []
    source = [data(r, 33, torch.float32, 2) for r in range(size)] if rank == root else None
    got = torch.zeros(33)
    dist.scatter(got, source, root, group=group)
    out.append(got)
    return out


def exchange(group, rank, size):
    out = []
    received = torch.zeros(size * 5)
    dist.all_to_all_single(received, data(rank, size * 5, torch.float32), group=group)
    out.append(received)
    sends = [(rank + r) % 3 for r in range(size)]
    receives = [(r + rank) % 3 for r in range(size)]
    uneven = torch.zeros(sum(receives), 4)
    dist.all_to_all_single(uneven, torch.full((sum(sends), 4), float(rank)), receives, sends, group=group)
    out.append(uneven)
    rows = [3] * size if rank == 0 else None  # said by one of them alone
    even = torch.zeros(size * 3)
    dist.all_to_all_single(even, 10.0 * rank + torch.arange(float(size)).repeat_interleave(3), rows, rows, group=group)
    out.append(even)
    right, left = (rank + 1) % size, (rank - 1) % size
    token = torch.zeros(1000)
    work = dist.isend(data(rank, 1000, torch.float32), right, group=group, tag=3)
    dist.recv(token, left, group=group, tag=3)
    work.wait()
    out.append(token)
    ops = [
        dist.P2POp(dist.isend, data(rank, 10, torch.int64), right, group),
        dist.P2POp(dist.irecv, batch := torch.zeros(10, dtype=torch.int64), left, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out.append(batch)
    return out


def objects(group, rank, size):
    everything = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank}, group=group)
    shared = [("from", rank)] if rank == 0 else [None]
    dist.broadcast_object_list(shared, 0, group=group)
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank * 10, gathered, 0, group=group)
    assert everything == [{"rank": r, "text": "x" * r} for r in range(size)]
    assert shared == [("from", 0)]
    assert gathered is None or gathered == [r * 10 for r in range(size)]
    return []


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("what", [reductions, movement, exchange, objects])
def test_equal_to_gloo(world, size, what, device):
    if what is exchange and size == 1:
        pytest.skip("gloo can't send to itself")
    world(size, lambda context: both(what), device=device)


def test_over_tcp(world, device):
    world(3, lambda context: [both(what) for what in (reductions, movement, exchange)], transport="tcp", device=device)


def equal(a, b):
    return torch.equal(a.cpu(), b.cpu())  # a GPU does not compare all types


def more(context):
    """What gloo lacks: against values computed here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(data(r, 100, torch.float32) for r in range(size))
    t = data(rank, 100, torch.float32)
    dist.all_reduce(t, dist.ReduceOp.AVG)
    torch.testing.assert_close(t, total / size)
    t = data(rank, 100, torch.float32)
    dist.all_reduce(t, dist._make_nccl_premul_sum(0.5))
    torch.testing.assert_close(t, total * 0.5)
    for dtype in (torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2):
        t = data(rank, 100, torch.float32).to(dtype)
        dist.all_reduce(t)
        assert equal(t, total.to(dtype)), dtype
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.bool):
        t = data(rank, 100, dtype)
        dist.broadcast(t, 0)
        assert equal(t, data(0, 100, dtype))

    out = torch.zeros(10)
    dist.reduce_scatter_tensor(out, torch.arange(10.0 * size))
    assert equal(out, torch.arange(10.0 * rank, 10.0 * (rank + 1)) * size)
    dist.reduce_scatter(out, [torch.full((10,), float(r)) for r in range(size)])
    assert equal(out, torch.full((10,), float(rank * size)))
    uneven = torch.zeros(rank + 1)
    dist.reduce_scatter(uneven, [torch.full((r + 1,), float(r)) for r in range(size)])
    assert equal(uneven, torch.full((rank + 1,), float(rank * size)))
    gathered = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(gathered, torch.full((rank + 1,), float(rank)))
    assert [g.tolist() for g in gathered] == [[float(r)] * (r + 1) for r in range(size)]
    lists = [torch.zeros(r + 1) for r in range(size)]
    dist.all_to_all(lists, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
    assert [g.tolist() for g in lists] == [[float(r)] * (r + 1) for r in range(size)]

    with dist._coalescing_manager(async_ops=True) as manager:
        many = [torch.ones(r + 1) for r in range(5)]
        for t in many:
            dist.all_reduce(t)
    manager.wait()
    assert all(bool((t == size).all()) for t in many)
    with dist._coalescing_manager(device=torch.get_default_device()):
        dist.broadcast(many[0], 0)
        dist.broadcast(many[1], 0)
    dist.all_reduce(t := torch.ones(3))
    assert t.tolist() == [size] * 3  # not swallowed afterwards

    if rank == 0:
        senders = sorted(dist.recv(torch.zeros(2)) for _ in range(size - 1))
        assert senders == list(range(1, size))
    else:
        dist.send(torch.ones(2), 0)
    dist.barrier()
    dist.group.WORLD._get_backend(torch.get_default_device()).monitored_barrier(wait_all_ranks=True)

    index = torch.tensor([[rank, 5]])
    sparse = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0]), (10,))
    dist.all_reduce(sparse)
    expected = torch.zeros(10)
    for r in range(size):
        expected[r] += 1
        expected[5] += 2
    assert equal(sparse.to_dense(), expected)

    t = torch.full((5,), float(rank))
    work = dist.all_reduce(t, async_op=True)
    future = work.get_future()
    assert future.wait()[0] is not None
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0].tolist() == t.tolist() == [sum(range(size))] * 5
    chained = (
        dist.all_reduce(torch.ones(4), async_op=True)
        .get_future()
        .then(lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0])
    )
    assert chained.wait().tolist() == [float(size * size)] * 4


@pytest.mark.parametrize("size", [1, 2, 4])
def test_beyond_gloo(world, size, device):
    world(size, more, device=device)


def subgroups(context):
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    t = torch.full((10,), float(rank))
    dist.all_reduce(t, group=pairs[rank // 2])
    assert t[0] == (1 if rank < 2 else 5)
    odd = dist.new_group([3, 1], use_local_synchronization=False)
    if rank in (1, 3):
        dist.all_reduce(t := torch.ones(2), group=odd)
        assert t.tolist() == [2, 2]
    dist.barrier()
    mesh = dist.init_device_mesh("cpu", (2, 2))
    dist.all_reduce(t := torch.tensor([float(rank)]), group=mesh.get_group(0))
    assert t.item() == rank + (rank + 2) % 4
    return [dist.get_rank(pair) for pair in pairs]


def test_subgroups(world):
    assert world(4, subgroups) == [[0, -1], [1, -1], [-1, 0], [-1, 1]]


def flushing(context):
    """Subnormal numbers are zeros for one rank's program, and for its thread. The library's sums are the same on both."""
    torch.set_flush_denormal(dist.get_rank() == 0)
    out = []
    for count in (4, 40_000, 300_000):
        bits = torch.full((count,), 700_000, dtype=torch.int32)
        for _ in range(5):
            dist.all_reduce(t := bits.clone().view(torch.float32))
            out.append(t.view(torch.int32).unique().tolist())
    torch.set_flush_denormal(False)
    return out


def test_a_thread_that_flushes_subnormal_numbers(world):
    assert world(2, flushing) == [[[1_400_000]] * 15] * 2


def mixed(context):
    assert dist.get_backend_config() == "cpu:gloo,cuda:ftcomm"
    dist.all_reduce(t := torch.ones(2))
    assert t.tolist() == [2, 2]


def test_mixed_backends(world):
    world(2, mixed, backend="cpu:gloo,cuda:ftcomm")


def on_gloo(context):
    group = dist.new_group(backend="ftcomm")
    pair = dist.new_group([0, 2], backend="ftcomm")
    dist.all_reduce(t := torch.ones(2), group=group)
    assert t.tolist() == [3, 3]
    if dist.get_rank() != 1:
        dist.all_reduce(t, group=pair)
        assert t.tolist() == [6, 6]
    dist.barrier()


def test_group_beside_gloo(world):
    world(3, on_gloo, backend="gloo")


def again(context):
    for _ in range(3):
        dist.all_reduce(t := torch.ones(1))
        assert t.item() == 2
        store, options = dist.distributed_c10d._get_default_store(), {"rank": dist.get_rank(), "world_size": 2}
        dist.destroy_process_group()
        dist.init_process_group("ftcomm", store=dist.PrefixStore("again", store), **options)


def test_destroy_and_init_again(world):
    world(2, again)
