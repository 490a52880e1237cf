"""Every collective against NumPy: types, operators, sizes, roots, uneven parts, on both transports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Ranks

import ftcomm
from ftcomm.dtypes import DTYPES

ml_dtypes = pytest.importorskip("ml_dtypes")
NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
SIZES = (0, 1, 3, 1000, 70_000)


def numpy_dtype(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name) if name in NARROW else name)


def data_of(rank: int, count: int, name: str) -> np.ndarray[Any, Any]:
    """Small whole numbers: every type holds them and their sums over few ranks exactly."""
    values = (np.arange(count) * (rank + 1)) % 4
    if name.startswith("complex"):
        return (values + 1j * rank).astype(name)
    return values.astype(numpy_dtype(name))


def everybody(size: int, count: int, name: str) -> list[np.ndarray[Any, Any]]:
    return [data_of(rank, count, name) for rank in range(size)]


def same(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected).astype(got.dtype))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduce_every_type(ranks: Ranks, transport: str, size: int) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        for name in DTYPES:
            for count in SIZES:
                buf = data_of(comm.rank, count, name)
                outcome = comm.all_reduce(buf)
                wide = np.complex128 if name.startswith("complex") else np.float64
                total = sum(data.astype(wide) for data in everybody(size, count, name))
                same(buf, total.astype(bool) if name == "bool" else total)
                assert outcome.contributors == tuple(range(size)), name

    ranks(size, run, transport=transport)


REFERENCE = {
    "sum": np.add.reduce,
    "product": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}


def test_all_reduce_every_operator(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        for op, reference in REFERENCE.items():
            for name in ("int32", "uint8", "int64") if op.startswith("b") else ("int32", "uint8", "float32", "float64"):
                for count in (5, 40_000):
                    buf = data_of(comm.rank, count, name) + np.dtype(name).type(1)
                    inputs = [data + np.dtype(name).type(1) for data in everybody(comm.size, count, name)]
                    comm.all_reduce(buf, op)
                    same(buf, reference(inputs))

    ranks(3, run, transport=transport)


def test_average_and_premultiplied_sum(ranks: Ranks) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        buf = np.full(1000, comm.rank, np.float32)
        comm.all_reduce(buf, "avg")
        same(buf, np.full(1000, 1.5))
        buf = np.full(1000, -(comm.rank + 1), np.int32)
        comm.all_reduce(buf, "avg")
        same(buf, np.full(1000, -2))  # -10 / 4, toward zero
        buf = np.full(1000, comm.rank, np.float64)
        comm.all_reduce(buf, "premul_sum", factor=0.5)
        same(buf, np.full(1000, 3.0))

    ranks(4, run)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "flat"])
def test_algorithms_agree(ranks: Ranks, algorithm: str) -> None:
    def run(comm: ftcomm.Communicator) -> bytes:
        out = b""
        for count in (1, 1000, 50_000):
            buf = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
            expected = sum(
                np.random.default_rng(r).standard_normal(count).astype(np.float32).astype(np.float64)
                for r in range(comm.size)
            )
            comm.all_reduce(buf, algorithm=algorithm)
            np.testing.assert_allclose(buf, expected, rtol=1e-5, atol=1e-5)
            out += buf.tobytes()
        return out

    results = ranks(3, run)
    assert results[0] == results[1] == results[2], "not the same bits on every rank"


def test_broadcast_and_reduce_every_root(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        for root in range(comm.size):
            for count in SIZES:
                buf = data_of(comm.rank, count, "float32")
                comm.broadcast(buf, root)
                same(buf, data_of(root, count, "float32"))
                buf = data_of(comm.rank, count, "int64")
                comm.reduce(buf, root)
                mine = (
                    sum(everybody(comm.size, count, "int64"))
                    if comm.rank == root
                    else data_of(comm.rank, count, "int64")
                )
                same(buf, mine)
        raw = b"from the root" if comm.rank == 1 else bytearray(13)
        comm.broadcast(raw, 1)
        assert bytes(raw) == b"from the root"

    ranks(3, run, transport=transport)


def test_gathers_and_scatters(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        for count in SIZES:
            inputs = everybody(comm.size, count, "float64")
            out = np.zeros(comm.size * count)
            comm.all_gather(out, inputs[comm.rank])
            same(out, np.concatenate(inputs))

            big = everybody(comm.size, comm.size * count, "int32")
            part = np.zeros(count, np.int32)
            comm.reduce_scatter(part, big[comm.rank])
            same(part, sum(big)[comm.rank * count : (comm.rank + 1) * count])

            for root in range(comm.size):
                out[:] = 0
                comm.gather(inputs[comm.rank], out if comm.rank == root else None, root)
                same(out, np.concatenate(inputs) if comm.rank == root else np.zeros_like(out))
                mine = np.zeros(count)
                comm.scatter(mine, np.concatenate(inputs) if comm.rank == root else None, root)
                same(mine, inputs[comm.rank])

            swapped = np.zeros(comm.size * count, np.int32)
            comm.all_to_all(swapped, big[comm.rank])
            pieces = [data.reshape(comm.size, count)[comm.rank] for data in big]
            same(swapped, np.concatenate(pieces))

    ranks(3, run, transport=transport)


def test_uneven_parts(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        counts = [0, 7, 5000][: comm.size]
        parts = [data_of(r, counts[r], "float32") for r in range(comm.size)]
        for root in range(comm.size):
            out = np.zeros(sum(counts), np.float32)
            comm.gather(
                parts[comm.rank], out if comm.rank == root else None, root, counts if comm.rank == root else None
            )
            if comm.rank == root:
                same(out, np.concatenate(parts))
            mine = np.zeros(counts[comm.rank], np.float32)
            comm.scatter(
                mine, np.concatenate(parts) if comm.rank == root else None, root, counts if comm.rank == root else None
            )
            same(mine, parts[comm.rank])
        sends = [comm.rank * 10 + r for r in range(comm.size)]
        takes = [r * 10 + comm.rank for r in range(comm.size)]
        out = np.zeros(sum(takes), np.int64)
        comm.all_to_all(out, np.repeat(np.arange(comm.size) + 100 * comm.rank, sends), takes, sends)
        same(out, np.repeat(np.arange(comm.size) * 100 + comm.rank, takes))

    ranks(3, run, transport=transport)


def test_raw_bytes_and_tensors(ranks: Ranks) -> None:
    torch = pytest.importorskip("torch")

    def run(comm: ftcomm.Communicator) -> None:
        raw = bytearray(np.full(100, comm.rank, np.float16).tobytes())
        comm.all_reduce(raw, dtype="float16")
        same(np.frombuffer(raw, np.float16), np.full(100, 1))
        tensor = torch.full((10, 10), comm.rank + 1, dtype=torch.bfloat16)
        comm.all_reduce(tensor)
        assert tensor.eq(3).all()
        parameter = torch.nn.Parameter(torch.full((5,), float(comm.rank)))
        comm.all_reduce(parameter)
        assert parameter.eq(1).all()

    ranks(2, run)


def test_many_at_once(ranks: Ranks, transport: str) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        bufs = [np.full(10 ** (i % 5), comm.rank + i, np.float32) for i in range(20)]
        requests = [comm.iall_reduce(buf) for buf in bufs]
        for i in reversed(range(20)):
            outcome = requests[i].wait()
            same(bufs[i], np.full_like(bufs[i], 3 * i + 3))
            assert outcome.contributors == (0, 1, 2)
            assert requests[i].test()
        outcomes = comm.all_reduce_many(bufs)
        assert len(outcomes) == 20
        for i, buf in enumerate(bufs):
            same(buf, np.full_like(buf, 3 * (3 * i + 3)))
        a, b = np.full(3, comm.rank), np.full(5, comm.rank)
        with comm.coalesce() as group:
            group.append(comm.iall_reduce(a, "max"))
            group.append(comm.ibroadcast(b, 2))
        same(a, np.full(3, 2))
        same(b, np.full(5, 2))

    ranks(3, run, transport=transport)


def test_outcome(ranks: Ranks) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        outcome = comm.all_reduce(np.zeros(1000, np.float32))
        assert outcome.chunks == ((0, 1000, (0, 1)),)
        assert outcome.epoch == comm.epoch
        assert comm.barrier().contributors == (0, 1)

    ranks(2, run)


def test_module_level_functions(ranks: Ranks) -> None:
    """torch.distributed's argument order, on the default communicator."""

    def run(comm: ftcomm.Communicator) -> None:
        rank, size = ftcomm.get_rank(), ftcomm.get_world_size()
        assert (rank, size, ftcomm.is_initialized()) == (comm.rank, 3, True)
        t = np.full(4, rank)
        ftcomm.all_reduce(t, "max")
        same(t, np.full(4, 2))
        t = np.full(4, rank)
        work = ftcomm.ft_all_reduce(t, "sum", async_op=True)
        assert isinstance(work, ftcomm.Request)
        work.wait()
        same(t, np.full(4, 3))
        ftcomm.broadcast(t, 1)
        ftcomm.reduce(t, 2)
        ftcomm.barrier()
        parts = [np.zeros(2, np.int64) for _ in range(size)]
        ftcomm.all_gather(parts, np.full(2, rank))
        assert [int(part[0]) for part in parts] == [0, 1, 2]
        ftcomm.gather(np.full(2, rank + 5), parts if rank == 1 else None, 1)
        assert [int(part[0]) for part in parts] == ([5, 6, 7] if rank == 1 else [0, 1, 2])
        mine = np.zeros(2, np.int64)
        ftcomm.scatter(mine, parts if rank == 1 else None, 1)
        same(mine, [5 + rank] * 2)
        ftcomm.reduce_scatter(mine, [np.full(2, 10 * rank + i) for i in range(size)])
        same(mine, [30 + 3 * rank] * 2)
        out = np.zeros(6, np.int64)
        ftcomm.all_gather_into_tensor(out, np.full(2, rank))
        same(out, [0, 0, 1, 1, 2, 2])
        ftcomm.reduce_scatter_tensor(mine, out)
        same(mine, [3 * rank] * 2)
        ftcomm.all_to_all_single(out, np.repeat(np.arange(3), 2))
        same(out, [rank] * 6)
        if rank == 0:
            ftcomm.send(np.full(2, 9), 1)
        elif rank == 1:
            assert ftcomm.recv(mine, 0) == 0
            same(mine, [9, 9])
        with pytest.raises(ftcomm.ConfigError, match="pair log"):
            ftcomm.ft_send(mine, 0)
        with pytest.raises(ftcomm.ConfigError, match="one for each of the 3 ranks"):
            ftcomm.all_gather(parts[:2], mine)

    ranks(3, run)


@pytest.mark.parametrize("size", [8, 16])
def test_more_ranks_than_cores(ranks: Ranks, size: int) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        for count in (1, 100_000):
            buf = np.full(count, comm.rank, np.float64)
            comm.all_reduce(buf)
            same(buf, np.full(count, size * (size - 1) / 2))

    ranks(size, run)


def test_small_sums_of_float16_are_rounded_once(ranks: Ranks) -> None:
    """2048 + 1 is a tie in float16 and goes back to 2048; 2048 + 1 + 1 is not. 60000 twice overflows, their average does not."""

    def run(comm: ftcomm.Communicator) -> tuple[float, float]:
        total, mean = np.full(64, 1 if comm.rank else 2048, np.float16), np.full(64, 60000, np.float16)
        comm.all_reduce(total, algorithm="flat")
        comm.all_reduce(mean, "avg", algorithm="flat")
        return float(total.min()), float(mean.max())

    assert ranks(3, run) == [(2050.0, float(np.float16(60000)))] * 3


@pytest.mark.parametrize("size", [1000, 30_000, 1_000_000])
def test_one_on_the_buffer_of_the_one_before(ranks: Ranks, size: int) -> None:
    """One after another: what the first one writes is what the second one reads, and the second writes when the first is done."""

    def run(comm: ftcomm.Communicator) -> tuple[list[float], list[float]]:
        x, out = np.full(size, 1.0 + comm.rank), np.zeros(size * comm.size)
        if comm.rank == 1:
            comm.recv(np.zeros(1), 0)  # so that both have been posted on rank 0
        requests = [comm.iall_reduce(x), comm.iall_gather(out, x)]
        if comm.rank == 0:
            comm.send(np.zeros(1), 1)
        for request in requests:
            request.wait()
        first = out[::size].tolist()
        comm.barrier()
        x[:], out[:] = comm.rank, 1.0
        requests = [comm.iall_reduce(out), comm.iall_gather(out, x)]
        for request in requests:
            request.wait()
        return first, out[::size].tolist()

    assert ranks(2, run) == [([3.0, 3.0], [0.0, 1.0])] * 2


def test_output_over_the_input(ranks: Ranks) -> None:
    def run(comm: ftcomm.Communicator) -> None:
        data = np.zeros(9)
        with pytest.raises(ftcomm.ConfigError, match="all_to_all lies over its input"):
            comm.all_to_all(data, data)
        with pytest.raises(ftcomm.ConfigError, match="or this rank's block of the input"):
            comm.reduce_scatter(data[1:4], data)
        comm.reduce_scatter(data[3 * comm.rank : 3 * comm.rank + 3], data)
        comm.all_gather(data, data[3 * comm.rank : 3 * comm.rank + 3])

    ranks(3, run)
