"""What the ranks of the tests of replay do: deterministic, and every step depends on all before it, so that one wrong bit
shows at the end."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from harness import Context

import ftcomm

SMALL, MIDDLE, LARGE = 300, 30_000, 200_000  # float32: flat; ring; pull or groups (with FTCOMM_PULL_LIMIT=131072)


def digest(*arrays: Any) -> str:
    h = hashlib.sha256()
    for array in arrays:
        h.update(np.ascontiguousarray(array).tobytes())
    return h.hexdigest()[:16]


def everything(comm: Any, context: Context, steps: int = 8) -> list[str]:
    """Each kind of operation, and messages: on to the next rank, to oneself, from anybody. The digests of all steps."""
    n, me = comm.size, comm.rank
    state = np.random.default_rng(7 + me).standard_normal(LARGE).astype(np.float32)
    history = []
    for step in range(steps):
        if step == 1:
            context.mark("running")
        for count in (SMALL, MIDDLE, LARGE):
            comm.all_reduce(state[:count], "avg")
            state[:count] += np.float32(0.01 * (me + 1) + step)
        comm.all_reduce(state[:1001], "avg", algorithm="ring-logged")
        state[:1001] += np.float32(0.01 * (me + 1) + step)
        _collectives(comm, state, step)
        _messages(comm, state, step)
        state *= np.float32(0.5)
        history.append(digest(state))
    assert n == comm.size
    return history


def _collectives(comm: Any, state: Any, step: int) -> None:
    n, me, root = comm.size, comm.rank, step % comm.size
    part = state[:MIDDLE].copy()
    comm.broadcast(part, root)
    state[:MIDDLE] += part * np.float32(0.1)
    gathered = np.zeros(n * 500, np.float32)
    comm.all_gather(gathered, state[:500].copy())
    state[: n * 500] += gathered
    for count in (100, 4_000):  # a sum that all have, and one that each has a part of
        block = np.zeros(count, np.float32)
        comm.reduce_scatter(block, np.tile(state[:count], n))
        state[:count] += block
        total = state[: 6 * count].copy()
        comm.reduce(total, root)
        if me == root:
            state[: 6 * count] += total
    received = np.zeros(n * 50, np.float32) if me == root else None
    comm.gather(state[:50].copy(), received, root)
    if received is not None:
        state[: n * 50] += received
    mine = np.zeros(40, np.float32)
    comm.scatter(mine, np.tile(state[:40], n) if me == root else None, root)
    state[:40] += mine
    for count in (30, 6_000, 34_000):  # brought, sent when it is asked for, shown where memory is shared
        swapped = np.zeros(n * count, np.float32)
        comm.all_to_all(swapped, np.resize(state[:700], n * count))
        state[: n * 30] += swapped[-n * 30 :]
    comm.barrier()


def _messages(comm: Any, state: Any, step: int) -> None:
    n, me = comm.size, comm.rank
    for count in (0, 10, MIDDLE, 3 * SMALL):
        got = np.zeros(count, np.float32)
        comm.ft_send(state[:count], (me + 1) % n, tag=count)
        assert comm.ft_recv(got, (me - 1) % n, tag=count) == (me - 1) % n
        state[:count] += got * np.float32(0.25)
    large = np.zeros(3 * LARGE, np.float32)  # copied as it comes, past the caches, by who waits for it
    coming = comm.irecv(large, (me - 1) % n, tag=1)
    comm.ft_send(np.tile(state, 3), (me + 1) % n, tag=1)
    coming.wait()
    state += large[2 * LARGE :] * np.float32(0.25)
    comm.ft_send(state[:20], me, tag=99)  # to oneself
    own = np.zeros(20, np.float32)
    comm.ft_recv(own, me, tag=99)
    state[:20] += own
    if me == 0:  # whoever comes first: the order is in the result
        order = np.zeros(n - 1, np.float32)
        for i in range(n - 1):
            order[i] = comm.ft_recv(np.zeros(5, np.float32), ftcomm.ANY, tag=7)
        comm.all_reduce(order, "sum")
    else:
        comm.ft_send(state[:5], 0, tag=7)
        order = np.zeros(n - 1, np.float32)
        comm.all_reduce(order, "sum")
    # Sorted: which rank came first is free, but must stay the same for the rank that asked.
    state[: n - 1] += np.sort(order)


def ring(comm: Any, context: Context, steps: int = 300, count: int = 3000) -> list[str]:
    """The paper's program: sums travel round a ring of ft_send and ft_recv; an all-reduce now and then."""
    n, me = comm.size, comm.rank
    x = np.full(count, me + 1, np.float32) / 7
    history = []
    for step in range(steps):
        if step == 1:
            context.mark("running")
        comm.ft_send(x, (me + 1) % n, tag=step % 3)
        y = np.empty_like(x)
        comm.ft_recv(y, (me - 1) % n, tag=step % 3)
        x = (x + y * np.float32(0.3) + np.float32(me * 0.1 + step)) / np.float32(3)
        if step % 4 == 0:
            comm.all_reduce(x, "avg")
            x += np.float32(me)
        history.append(digest(x))
    return history
