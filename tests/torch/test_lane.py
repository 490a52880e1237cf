"""Operations that wait for a device, without one: the group's lane waits for a function of the test instead.

tests/torch/test_device.py has the same with a GPU, where there is one.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ftcomm
import ftcomm.torch
from ftcomm.torch import groups


def device(group, fn):
    groups.backend_of(group).set_device(fn)


def in_turn(context):
    """Operations of the group and of its communicator, in the order of the calls, however late each rank's device is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    comm = ftcomm.torch.communicator()
    comm.all_reduce(torch.ones(10))  # so that it has taken the short way once
    late = random.Random(rank)
    if rank > 0:  # who has none posts at once
        device(None, lambda: time.sleep(late.random() / 200))
    for number in range(30):
        works = [dist.all_reduce(torch.full((100,), float(number + n)), async_op=True) for n in range(3)]
        comm.all_reduce(mine := torch.full((100,), 1000.0 + number))
        assert bool((mine == size * (1000 + number)).all())
        for n, work in enumerate(works):
            work.wait()
            assert bool((work.result()[0] == size * (number + n)).all())
        if rank == 0:
            comm.send(torch.full((5,), float(number)), 1)
        elif rank == 1:
            comm.recv(got := torch.zeros(5), 0)
            assert got.tolist() == [float(number)] * 5


def test_direct_calls_keep_their_turn(world):
    world(3, in_turn)


def hung(context):
    """The device comes to nothing any more: every wait ends, and the group can be left."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(3), group=group)
    comes = threading.Event()
    device(group, comes.wait)
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(2)]
    with pytest.raises(dist.DistBackendError, match=r"Timed out.* device has not come") as caught:
        works[0].wait()
    assert isinstance(caught.value.__cause__, ftcomm.Timeout)
    with pytest.raises(ftcomm.Timeout, match="wait for this rank's device"):
        ftcomm.torch.communicator(group).all_reduce(torch.ones(3))
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        works[1].wait(timedelta(seconds=60))
    dist.destroy_process_group(group)
    dist.barrier()
    comes.set()
    for work in works:
        with pytest.raises(dist.DistBackendError, match="closed"):
            work.wait()
    dist.all_reduce(t := torch.ones(3))
    assert t.tolist() == [2.0] * 3


def test_a_device_that_hangs(world):
    world(2, hung)


def closed_at_once(context):
    """The group is left when its lane is about to wait for a device that comes to nothing any more: nobody may join that."""
    for _ in range(20):
        group = dist.new_group()
        device(group, threading.Event().wait)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="closed|device has not come"):
            work.wait(timedelta(milliseconds=10))


def test_closed_before_the_lane_waits(world):
    world(2, closed_at_once)


def late_after_all(context):
    """It is posted all the same when its data comes, and given up at once: whether it is made or fails, it is so on all ranks."""
    rank, found = dist.get_rank(), []
    for count in (3, 1 << 20):
        comes = threading.Event()
        group = dist.new_group()
        if rank == 0:
            device(group, comes.wait)
        work = dist.all_reduce(t := torch.ones(count), group=group, async_op=True)
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="device has not come"):
                work.wait(timedelta(milliseconds=1))
            comes.set()
        try:
            work.wait()
            found.append(bool((t == 2).all()))
        except dist.DistBackendError:
            found.append(None)
    dist.barrier()
    return found


def test_given_up_before_it_was_posted(world):
    values = world(2, late_after_all)
    assert values[0] == values[1]
    assert False not in values[0]


def failing(context):
    """On one rank only, before the others could meet it: nothing of that rank's may meet a wrong one of theirs."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=3))

    def fails():
        raise RuntimeError("the device is lost")

    if rank == 0:
        device(group, fails)
        for _ in range(2):
            with pytest.raises(dist.DistBackendError, match="the device is lost"):
                dist.all_reduce(torch.ones(3), group=group)
        with pytest.raises(ftcomm.SystemFailure, match="make a new group"):
            ftcomm.torch.communicator(group).all_reduce(torch.ones(3))
    else:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(3), group=group)
        assert isinstance(caught.value.__cause__, ftcomm.Timeout)
    dist.barrier()
    dist.all_reduce(t := torch.ones(3), group=dist.new_group())
    assert t.tolist() == [2.0] * 3


def test_an_operation_that_fails_on_one_rank(world):
    world(2, failing)


def closed(context):
    """Nobody waits for a lane that has ended."""
    group = dist.new_group()
    device(group, lambda: None)
    dist.all_reduce(torch.ones(3), group=group)
    backend = groups.backend_of(group)
    dist.destroy_process_group(group)
    for _ in range(3):
        with pytest.raises(dist.DistBackendError, match="closed"):
            backend.allreduce([torch.ones(3)]).wait()
    del backend, group
    dist.all_reduce(t := torch.ones(3))
    assert t.tolist() == [2.0] * 3


def test_operations_of_a_closed_group(world):
    world(2, closed)


def dropped(context):
    """The last reference may be the lane's own. What had begun here only, as the others had closed before, times out."""
    for _ in range(5):
        group = dist.new_group(timeout=timedelta(seconds=2))
        device(group, lambda: time.sleep(0.002))
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.destroy_process_group(group)
        del group
        try:
            work.wait()
        except dist.DistBackendError as error:
            assert re.search("closed|had not entered", str(error))
        del work
    dist.barrier()


def test_a_group_that_is_dropped_with_its_lane_busy(world):
    world(3, dropped)
