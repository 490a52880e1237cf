"""Process groups: the job under them, their communicators, and the way back from a group to its Communicator."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ftcomm._lib import lib
from ftcomm.communicator import Communicator, communicator_id
from ftcomm.errors import ConfigError, SystemFailure, Timeout
from ftcomm.job import Job
from ftcomm.options import POLICIES, Options
from ftcomm.rendezvous import incarnation_from_environment, job_name, job_of_this_start, start_job
from ftcomm.request import Outcome
from ftcomm.torch import rendezvous
from ftcomm.torch._extension import load
from ftcomm.torch.objects import refuse_objects_outside
from ftcomm.torch.register import DEVICES
from ftcomm.torch.replicas import serve_replicas
from ftcomm.torch.shrunk import serve_all_devices

__all__ = [
    "backend_of",
    "communicator",
    "communicator_of",
    "create",
    "job_of",
    "others_open",
    "outcome",
    "over_all_ranks",
]

_SETTLE = 5.0  # seconds that callbacks of futures have at the end of the process


@dataclasses.dataclass
class _Entry:
    """A job of this process and the torch ranks that it was started with, in the order of its slots."""

    job: Job
    ref: Any
    ranks: list[int]


_lock = threading.RLock()
_entries: dict[int, _Entry] = {}  # by the native job's address
_groups: dict[str, Any] = {}  # open backends by torch's name of the group
_started: collections.Counter[str] = collections.Counter()  # by a job's name
_made_before: collections.Counter[tuple[Any, ...]] = collections.Counter()  # groups, by job, name and slots


def create(dist_opts: Any, pg_options: Any) -> Any:
    """What torch calls for each device type of a new group; a group has one backend for all of them."""
    extension = load()
    serve_all_devices(extension.FtBackend, _adopt)
    serve_replicas(_own_backend)
    refuse_objects_outside(_own_backend)
    if pg_options is not None and not isinstance(pg_options, Options):
        raise ConfigError(f"pg_options must be an ftcomm.Options, not {type(pg_options).__name__}.")
    name = str(dist_opts.group_id)
    given = dist_opts.timeout.total_seconds()
    if given <= 0:
        raise ConfigError(
            f"timeout={given:g} s must be positive. (torch makes a negative one of what it can't hold, as of timedelta.max: take "
            "days or years.)"
        )
    with _lock:
        # torch may give the name of a group that was aborted to another one.
        for old in [old for old, backend in _groups.items() if backend.closed or backend.aborted]:
            del _groups[old]
        if name in _groups:
            return _groups[name]
        ranks = [int(rank) for rank in dist_opts.global_ranks_in_group] or list(range(dist_opts.group_size))
        found = _find(ranks) if dist_opts.global_ranks_in_group else None
        options = pg_options or (found[0].job.options if found else Options())
        _check_debug_level(options)
        entry, slots = found or (_start(dist_opts, ranks, options), list(range(len(ranks))))
        timeout = _timeout(given, pg_options, options)
        # And so to what was destroyed, of the same ranks: its number is not free again.
        key = (entry.job.name, name, *slots)
        before = _made_before[key]
        _made_before[key] += 1
        backend = extension.FtBackend(
            job=entry.ref,
            id=communicator_id(entry.job.name, "torch", name, *slots, *([f"again {before}"] if before else [])),
            name="world" if not dist_opts.global_ranks_in_group else f"group {name}",
            slots=slots,
            rank=dist_opts.group_rank,
            policy=POLICIES.index(options.policy),
            timeout=timeout,
        )
        _watch(name, backend)
        return backend


def _watch(name: str, backend: Any) -> None:
    backend.set_on_lane(functools.partial(_uses_a_device, backend.comm_id))
    _groups[name] = backend


def _adopt(backend: Any) -> None:
    """That of a group which torch has shrunk."""
    with _lock:
        _watch(f"{backend.comm_name} {backend.comm_id:x}", backend)


def _timeout(given: float, own: Options | None, options: Options) -> float:
    """Seconds. What was said for this group wins, and of that the options; torch has a default, which was said by nobody."""
    if own is not None and own.timeout is not None:
        return own.timeout
    if options.timeout is not None and given == dist.default_pg_timeout.total_seconds():
        return options.timeout
    return given


def _check_debug_level(options: Options) -> None:
    """At DETAIL torch puts a gloo group beside each group. All ranks make it at once: a replacement would wait in vain."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return
    if options.policy == "replay" or incarnation_from_environment() > 0:
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a gloo group beside each process group, and a replacement can't get into that. "
            "Set it to INFO or OFF for runs in which processes are replaced."
        )


def _find(ranks: list[int]) -> tuple[_Entry, list[int]] | None:
    """The job that already links these ranks, and their slots in it; all of them find the same one."""
    default = _own_backend(dist.distributed_c10d._get_default_group()) if dist.is_initialized() else None
    if default is not None and not default.closed:
        # After shrink_group the default group's ranks are numbered anew.
        entry = _entries.get(default.job.pointer)
        if entry is None:
            raise ConfigError(
                "This process has left the job of the default group; a group of it can't be made any more."
            )
        return entry, [default.slots[rank] for rank in ranks]
    for entry in _entries.values():
        if not entry.job.closed and set(ranks) <= set(entry.ranks):
            return entry, [entry.ranks.index(rank) for rank in ranks]
    return None


def _start(dist_opts: Any, ranks: list[int], options: Options) -> _Entry:
    meeting = None if dist_opts.global_ranks_in_group else rendezvous.take()
    agents = None if dist_opts.global_ranks_in_group else rendezvous.take_agents()
    store, rank, size, timeout = (
        dist_opts.store,
        dist_opts.group_rank,
        dist_opts.group_size,
        dist_opts.timeout.total_seconds(),
    )
    if agents is not None:
        store = dist.PrefixStore("ftcomm/torch", agents)
        name = job_of_this_start(store, rank, size, timeout)
    else:
        name = meeting.job if meeting is not None else job_name()
    if dist_opts.global_ranks_in_group:  # the default group has another backend
        name += f".{communicator_id('group', dist_opts.group_id, *ranks):x}"
    base = name
    if _started[base]:
        name += f".{_started[base]}"  # destroyed and initialized again, maybe over the same store
    around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if meeting is not None:
        options = dataclasses.replace(options, secret=options.secret or meeting.secret)
        around = rendezvous.starting(meeting, store, name)
    with around:
        job = start_job(
            store,
            rank,
            size,
            options,
            job=name,
            timeout=timeout,
        )
    _started[base] += 1
    entry = _Entry(job, None, ranks)
    entry.ref = load().JobRef(job.pointer, lambda: _leave(entry))
    _entries[job.pointer] = entry
    job.before_close(lambda: _forget(entry))  # also by Communicator.leave(), which knows of no groups
    return entry


def leave(job: Job) -> None:
    """This process goes on without the job, and may destroy its groups afterwards: what is native in them lets go of it."""
    entry = _entries.get(job.pointer)
    _leave(entry) if entry is not None else job.leave()


def _leave(entry: _Entry, at_exit: bool = False) -> None:
    """The last group was destroyed: the others need not wait for this process any more."""
    entry.ref.retire()
    entry.job.leave_at_exit() if at_exit else entry.job.leave()


def _forget(entry: _Entry) -> None:
    """The job is about to be closed."""
    entry.ref.retire()
    with _lock:
        if _entries.get(entry.ref.pointer) is entry:
            del _entries[entry.ref.pointer]


def _own_backend(group: Any) -> Any:
    """The FtBackend of a process group for whichever device it serves, or None."""
    extension = load()
    for device in DEVICES:
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:
            continue
        while not isinstance(backend, extension.FtBackend) and hasattr(backend, "wrapped_pg"):
            backend = backend.wrapped_pg  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, extension.FtBackend):
            return backend
    return None


def backend_of(group: Any = None) -> Any:
    """The native backend under a process group (default: the default group).

    Raises:
        ConfigError: the group has another backend, or was destroyed.
    """
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    backend = _own_backend(group)
    if backend is None:
        raise ConfigError(
            "This process group does not run on ftcomm. Make it with backend='ftcomm' (or 'cpu:gloo,cuda:ftcomm')."
        )
    return backend


def job_of(backend: Any) -> Job:
    """The job that a native backend belongs to."""
    entry = _entries.get(backend.job.pointer)
    if entry is None or backend.closed:
        raise ConfigError("This process group was destroyed; its job has ended.")
    return entry.job


class _GroupCommunicator(Communicator):
    """Its operations come after those of the group that still wait for a device, as they were called."""

    def __init__(self, backend: Any) -> None:
        super().__init__(job_of(backend), backend.comm_id, backend.comm_name, backend.slots, POLICIES[backend.policy])
        self._waits = False
        with _made_lock:
            _made.add(self)
        if backend.used_lane:
            self._uses_a_device()

    def _uses_a_device(self) -> None:
        """The compiled calls would not wait for it."""
        self._waits = True
        self._no_short_way()

    @property
    def operations(self) -> int:
        """The number of the next one, when all that were called before have theirs."""
        return int(lib()[1].ft_comm_seq(*self._ordered))

    @property
    def _ordered(self) -> tuple[Any, int]:  # type: ignore[override]
        if self._waits:
            # Not held by this: a join point's communicator is held by its job, and that by the backend.
            backend = next((one for one in list(_groups.values()) if one.comm_id == self.id), None)
            found = _YES if backend is None else backend.drain()
            if found == _TIMED_OUT:
                raise Timeout(
                    f"Operations of {self.name} still wait for this rank's device after the group's timeout, and this one comes "
                    "after them. What was given to the device before them has not ended.",
                    operation=f"a call on {self.name}",
                )
            if found == _BROKEN:
                raise SystemFailure(
                    f"An operation of {self.name} failed on this rank before the others could meet it: this one would meet the "
                    "wrong ones. End this process, or make a new group."
                )
        return self._native


_YES, _TIMED_OUT, _BROKEN = range(3)  # of drain()
_made_lock = threading.Lock()
_made: weakref.WeakSet[_GroupCommunicator] = weakref.WeakSet()


def _uses_a_device(comm_id: int) -> None:
    """The group's first operation that waits for a device is about to be made."""
    with _made_lock:
        for one in _made:
            if one.id == comm_id:
                one._uses_a_device()


def communicator(group: Any = None) -> Communicator:
    """The :class:`ftcomm.Communicator` under a process group: agree, alive, failed, revoke, direct operations.

    Its operations and the group's are numbered together: call both in the same order on all ranks, from one thread.
    """
    return communicator_of(backend_of(group))


def communicator_of(backend: Any) -> Communicator:
    return _GroupCommunicator(backend)


def others_open() -> list[Communicator]:
    """Of this process's groups besides the default one, in the order in which they were made."""
    default = backend_of()
    with _lock:
        found = [one for one in _groups.values() if one is not default and not one.closed and not one.aborted]
    return [communicator_of(backend) for backend in found]


def over_all_ranks(job: Job) -> list[Any]:
    """The open backends of this process's groups that have all ranks of the job, the default group's among them."""
    with _lock:
        found = [
            one for one in _groups.values() if not one.closed and not one.aborted and one.job.pointer == job.pointer
        ]
    return [one for one in found if len(one.slots) == job.world_size]


def outcome(work: Any) -> Outcome:
    """Who contributed to a finished operation (``work = dist.all_reduce(t, async_op=True); work.wait()``).

    Raises:
        ConfigError: it is not finished, has failed, or belongs to another backend.
    """
    found = load().outcome(work)
    if found is None:
        raise ConfigError(
            "outcome() needs a Work of an ftcomm group that has succeeded: make the call with async_op=True and wait for it."
        )
    contributors, chunks, epoch = found
    return Outcome(contributors, tuple(chunks), epoch)


def _leave_all() -> None:
    """Before Python's own end: the extension's threads must find no half-gone job."""
    for entry in list(_entries.values()):
        try:
            _leave(entry, at_exit=True)
        except Exception:  # noqa: BLE001 - at exit there is nobody to tell
            continue
    if _started:
        load().settle(_SETTLE)


def _forget_in_child() -> None:
    _entries.clear()
    _groups.clear()


atexit.register(_leave_all)  # runs before ftcomm.job's own, which was registered earlier
os.register_at_fork(after_in_child=_forget_in_child)
