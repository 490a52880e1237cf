"""Groups and works at their end: what is pending then, names and numbers that are used again, callbacks, dead roots."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

import ftcomm
import ftcomm.torch
from ftcomm.torch.groups import backend_of
from ftcomm.torch.reducer import reset_hook_state


def test_a_pending_work_fails_when_its_group_ends(world: Any) -> None:
    """Nobody else is gone: the other rank has not called it."""

    def run(context: Any) -> Any:
        if context.rank == 1:
            return context.hold()
        works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (4, 300_000, 3, 2)]
        before = works[2].get_future()
        dist.destroy_process_group()
        said = []
        for work in works[:2]:
            with pytest.raises(dist.DistBackendError) as caught:
                work.wait()
            said.append(type(caught.value.__cause__).__name__)
            assert work.is_completed()
            assert work.exception() is not None
        while not works[3].is_completed():
            pass
        after = works[3].get_future()
        for future in (before, after):
            with pytest.raises(RuntimeError):
                future.wait()
        context.mark("failed")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the rig to destroy
        return said

    group = world.start(2, run)
    group.wait_for(0, "failed")
    group.release(1)
    assert world.values(group)[0] == ["Closed"] * 2


def test_a_broadcast_of_the_script_fails_with_its_root(world: Any) -> None:
    """What DDP hands round comes from another rank then; of anything else the others have nothing."""

    def run(context: Any) -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(None, ftcomm.torch.lossy_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(4):
            ftcomm.torch.join_point(ddp, optimizer)
            if context.rank == 0 and step == 2:
                context.die()
            ddp(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        kept = torch.full((3,), -7.0)
        for call in (
            lambda: dist.broadcast(kept, 0),
            lambda: dist.broadcast(kept, 0, async_op=True).wait(),
            lambda: dist.broadcast_object_list([None], 0),
        ):
            with pytest.raises(dist.DistBackendError) as caught:
                call()
            assert isinstance(caught.value.__cause__, ftcomm.PeerFailure)
        return net[1].running_mean.tolist()

    values = [one for one in world.values(world.start(3, run, policy="lossy"), dies=(0,)) if one is not None]
    assert len(values) == 2
    assert values[0] == values[1]


def test_a_replacement_gets_no_objects_before_it_is_let_in(world: Any) -> None:
    """torch would take a size, and pickled bytes, out of memory that nobody has filled."""

    def run(context: Any) -> Any:
        if not context.incarnation:
            if context.rank == 1:
                context.die()
            context.mark("there")
            context.hold()
            return None
        for call in (
            lambda: dist.broadcast_object_list([None], 0),
            lambda: dist.broadcast_object_list([None], group_src=0, group=dist.new_group([0, 1])),
            lambda: dist.scatter_object_list([None]),
        ):
            with pytest.raises(dist.DistBackendError, match="not admitted yet") as caught:
                call()
            assert isinstance(caught.value.__cause__, ftcomm.Unsupported)
        own, part = ["own"], [None]
        dist.broadcast_object_list(own, src=1)
        dist.scatter_object_list(part, [None, "part"], src=1)
        return own + part

    group = world.start(2, run, policy="lossy")
    group.wait_for(0, "there")
    group.wait_ended(1)
    world.replace(group, 1)
    group.wait_ended(1, 1)
    group.release(0)
    assert [one for one in world.values(group, dies=(1,)) if one is not None] == [["own", "part"]]


def test_groups_after_a_shrink_are_new_ones(world: Any) -> None:
    """torch counts them from the beginning again, and so names them as those that it has aborted."""

    def run(context: Any) -> Any:
        dist.new_group([0, 1])
        dist.new_group([0, 2])
        if context.rank == 1:
            context.die()
        with pytest.raises(dist.DistBackendError):
            for _ in range(100):
                dist.all_reduce(torch.ones(1000))
        dist.shrink_group([1])
        sums = []
        for ranks in ([0, 1], [0, 1], [0, 1]):
            dist.all_reduce(t := torch.ones(1), group=dist.new_group(ranks))
            sums.append(t.item())
        return sums

    values = [one for one in world.values(world.start(3, run), dies=(1,)) if one is not None]
    assert values == [[2.0] * 3] * 2


def test_a_group_that_was_destroyed_is_made_again(world: Any) -> None:
    def run(context: Any) -> Any:
        sums = []
        for _ in range(3):
            group = dist.new_group([0, 1], use_local_synchronization=True)
            dist.all_reduce(t := torch.ones(1), group=group)
            sums.append(t.item())
            dist.destroy_process_group(group)
        return sums

    assert world(2, run) == [[2.0] * 3] * 2


def test_a_message_in_a_backward_pass_does_not_wait_for_its_answer(world: Any) -> None:
    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            peer, found = 1 - dist.get_rank(), torch.zeros_like(gradient)
            future = dist.irecv(found, peer).get_future()
            dist.send(gradient * (1 + dist.get_rank()), peer)
            future.wait()
            return found

    def run(context: Any) -> Any:
        x = torch.ones(3, requires_grad=True)
        Exchange.apply(x).sum().backward()
        return x.grad.tolist()

    assert world(2, run) == [[2.0] * 3, [1.0] * 3]


def test_callbacks_that_still_run_at_the_end(world: Any) -> None:
    """The job's end completes the futures; the interpreter's must not come into a callback."""

    def run(context: Any) -> None:
        if context.rank == 1:
            work = dist.group.WORLD
            futures = [
                work.recv([torch.zeros(4)], 0, n).get_future().then(lambda _: sum(range(20_000))) for n in range(20)
            ]
            assert len(futures) == 20

        context.mark("there")

    for _ in range(3):
        assert world(2, run) == [None, None]


def test_options_can_be_copied(world: Any) -> None:
    """As torch does for groups that it splits off one that is bound to a device."""

    def run(context: Any) -> Any:
        options = copy.deepcopy(backend_of().options)
        return options.policy, options.group_name

    assert world(1, run, policy="lossy") == [("lossy", "world")]


def test_a_timeout_that_torch_cannot_hold(world: Any) -> None:
    """It comes as a negative one: said at once, not as ranks that never came."""

    def run(context: Any) -> float:
        for timeout in (timedelta.max, timedelta(0), timedelta(seconds=-5)):
            with pytest.raises(ftcomm.ConfigError, match="must be positive"):
                dist.new_group(timeout=timeout)
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group(timeout=timedelta(days=365)))
        return float(total)

    assert world(2, run) == [2.0, 2.0]


def test_a_local_sgd_hook_begins_again() -> None:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=10)
    state.iter = 7
    reset_hook_state(state)
    assert state.iter == 0


def test_tensors_that_no_join_point_can_move(world: Any) -> None:
    def run(context: Any) -> str:
        net = torch.nn.Linear(2, 2)
        net.register_buffer("places", torch.eye(3).to_sparse())
        with pytest.raises(ftcomm.ConfigError) as caught:
            ftcomm.torch.join_point(net, torch.optim.SGD(net.parameters(), 0.1))
        return str(caught.value)

    assert "buffer places is torch.sparse_coo" in world(1, run, policy="lossy")[0]
