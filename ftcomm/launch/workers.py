"""The workers of one node: a torch process context in which a failed worker is replaced and its siblings go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.distributed.elastic.multiprocessing import ProcessFailure, RunProcsResult, SubprocessContext

from ftcomm.launch.standbys import Standbys, common_environment
from ftcomm.launch.worker import AGAIN, Worker


class SlotState(Enum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass
class Slot:
    """One rank's place on this node, whoever holds it."""

    local_rank: int
    rank: int
    first: int  # the incarnation of its first worker here
    incarnation: int
    founder: int | None  # the incarnation that was there at the start of the job, or of its present generation
    failures: int = 0  # of its workers by themselves
    state: SlotState = SlotState.RUNNING

    @property
    def replacements(self) -> int:
        """That it has had here."""
        return self.incarnation - self.first


@dataclass(frozen=True)
class Exit:
    """A worker that ended, already reaped."""

    slot: Slot
    pid: int
    incarnation: int
    code: int
    failure: ProcessFailure | None


class WorkerContext(SubprocessContext):  # type: ignore[misc]
    """torch's context, in which one worker's end is not the end of the others.

    The base class closes all workers as soon as one fails; here :meth:`ended` tells what ended, and the agent decides.
    """

    slots: dict[int, Slot]

    def __init__(self, *args: Any, first: int, founders: bool, **kwargs: Any) -> None:
        """``first``: the incarnation of all. ``founders``: of the job; else they are replacements of others elsewhere."""
        super().__init__(*args, **kwargs)
        self._first, self._founder = first, first if founders else None
        self.standbys = Standbys(0, (), (), {}, set())

    def start(self) -> None:
        """As the base class, which also sets signal handlers that raise wherever the agent happens to be."""
        self._start()
        for tail_log in self._tail_logs:
            tail_log.start()

    def _start(self) -> None:
        self.slots = {
            local_rank: Slot(local_rank, int(self.envs[local_rank]["RANK"]), self._first, self._first, self._founder)
            for local_rank in self.args
        }
        for local_rank in self.slots:
            self._launch(local_rank)

    def _launch(self, local_rank: int) -> None:
        slot = self.slots[local_rank]
        self.envs[local_rank]["FTCOMM_INCARNATION"] = str(slot.incarnation)
        self.subprocess_handlers[local_rank] = Worker(
            entrypoint=self.entrypoint,
            args=self.args[local_rank],
            env=self.envs[local_rank],
            stdout=self.stdouts[local_rank] or None,
            stderr=self.stderrs[local_rank] or None,
            local_rank_id=local_rank,
            numa_options=self._numa_options,
            take=self.standbys.take,
        )

    def keep_standbys(self, count: int, flags: int) -> None:
        """For workers that are started from now on. ``flags``: how many of their arguments are the interpreter's."""
        args = [str(arg) for arg in next(iter(self.args.values()))]
        environment, particular = common_environment(list(self.envs.values()))
        self.standbys.end()
        self.standbys = Standbys(count, [self.entrypoint, *args[:flags]], args[flags:], environment, particular)

    def worker(self, slot: Slot) -> Worker:
        handler = self.subprocess_handlers[slot.local_rank]
        assert isinstance(handler, Worker)
        return handler

    def running(self) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.state is SlotState.RUNNING]

    def ended(self) -> list[Exit]:
        """Running workers that have ended since the last call. They are reaped; the caller replaces or settles each."""
        exits = []
        for slot in self.running():
            worker = self.worker(slot)
            code = worker.reap()
            if code is None:
                continue
            failure = None if code == 0 else self.failure(slot, worker.pid, code)
            exits.append(Exit(slot, worker.pid, slot.incarnation, code, failure))
            slot.state = SlotState.SUCCEEDED if code == 0 else SlotState.FAILED
        return exits

    def replace(self, slot: Slot) -> None:
        """Starts the next incarnation of a slot whose worker has been reaped. The slot is as before if that raises."""
        assert self.worker(slot).proc.returncode is not None, "a replacement must not start beside its predecessor"
        slot.incarnation += 1
        try:
            self._launch(slot.local_rank)
        except BaseException:
            slot.incarnation -= 1
            raise
        slot.state = SlotState.RUNNING

    def found(self, slot: Slot) -> None:
        """As :meth:`replace`, as a founder of a new generation."""
        self.replace(slot)
        slot.founder = slot.incarnation

    def signal_all(self, sig: signal.Signals) -> None:
        for slot in self.running():
            self.worker(slot).send(sig)

    def kill_all(self) -> None:
        for slot in self.running():
            self.worker(slot).kill()

    def failure(self, slot: Slot, pid: int, code: int) -> ProcessFailure:
        error_file = self.error_files[slot.local_rank]  # /dev/null with `--log-dir /dev/null`
        try:
            return ProcessFailure(local_rank=slot.local_rank, pid=pid, exitcode=code, error_file=error_file)
        except (ValueError, KeyError, TypeError, OSError):  # killed while it wrote it: it is as good as not there
            return ProcessFailure(local_rank=slot.local_rank, pid=pid, exitcode=code, error_file=os.devnull)
        finally:
            if os.path.isfile(error_file):
                with contextlib.suppress(OSError):
                    os.unlink(error_file)  # else the next incarnation's failure would be told with this one's words

    def _poll(self) -> RunProcsResult | None:
        """For callers of the base class; the agent works with :meth:`ended`."""
        self.ended()
        if self.running():
            return None
        return RunProcsResult(return_values=dict.fromkeys(self.slots), stdouts=self.stdouts, stderrs=self.stderrs)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """The last resort on any way out of the agent: whatever still runs is killed."""
        self.standbys.end()
        left = [h for h in self.subprocess_handlers.values() if isinstance(h, Worker) and h.proc.returncode is None]
        for handler in left:
            with contextlib.suppress(OSError):  # of one that has become another user's; it dies with ftrun all the same
                handler.kill()
        until = time.monotonic() + AGAIN
        for handler in left:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it sleeps in the kernel: nothing more can be done
                handler.proc.wait(max(0.0, until - time.monotonic()))


def start_workers(
    *, name: str, entrypoint: Any, args: Any, envs: Any, start_method: str, first: int, founders: bool, **rest: Any
) -> WorkerContext:
    """Takes the place of torch's ``start_processes`` in the agent; its arguments pass through."""
    context = WorkerContext(
        name=name, entrypoint=entrypoint, args=args, envs=envs, first=first, founders=founders, **rest
    )
    try:
        context.start()
    except Exception:
        context.close()
        raise
    return context
