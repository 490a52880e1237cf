"""What ftrun does under the policy replay, for ranks that are forked from a test: whoever dies is started again.

A rank that dies while another one is in the job comes back as its replacement; when nobody is left, all start again as the next
generation. Ranks run again from the top of their function.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness import Context, Failed, Ranks, Result

import ftcomm
from ftcomm import exit_code

Program = Callable[[Any, Context], Any]
MOST_RESTARTS = 150
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL}


def faults(victims: set[int], point: str, incarnation: int = 0) -> str:
    """Each of them is killed there."""
    return ";".join(f"rank={victim}.{incarnation},at={point},do=kill" for victim in sorted(victims))


class Keeper:
    """One job of ``size`` ranks that survives everything. ``values()`` waits for its end.

    ``on_death(self, rank)`` is called when a rank is dead and nobody has come in its place. ``hosts``: of each rank, pretended.
    ``seen_late``: a rank whose death is seen only when the others of its log group are back, as they may be.
    """

    def __init__(
        self,
        ranks: Ranks,
        size: int,
        program: Program,
        *,
        faults: str = "",
        log_limit: int = 1 << 30,
        on_death: Callable[[Keeper, int], None] | None = None,
        hosts: list[str] | None = None,
        seen_late: int | None = None,
        **options: Any,
    ):
        # Forked children have this environment: whose the log is, and where.
        group = ranks.start(size, None, faults=faults, policy="replay", log_limit=log_limit, **options)
        self.group, self.size = group, size
        if hosts is not None:
            group.options_of = lambda rank: dataclasses.replace(group.options, host=hosts[rank])  # type: ignore[method-assign]
        self.folder = Path(f"/dev/shm/ftcomm-log-{os.getuid()}-{group.job}")
        self.generation = 0
        self.restarts = 0
        self.deaths: list[tuple[int, int]] = []
        self._errors: list[str] = []
        self._taken: set[tuple[int, int]] = set()  # that are not to end, though they may be about to
        self._round = [0] * size  # of each rank's process: how often its log group had started again
        self.taken_along: list[tuple[int, int]] = []  # by the death of one of their log group
        self._program, self._on_death = program, on_death
        self._seen_late = seen_late
        self._incarnation = [0] * size
        self._member = [True] * size
        self._value: list[Any] = [None] * size
        self._finished = [False] * size
        self._groups = options.get("log", "all")
        for rank in range(size):
            self._spawn(rank)

    # -- what a test does to it

    def kill(self, rank: int) -> bool:
        """SIGKILL to whoever is the rank now; False if it has ended by itself. It is replaced."""
        incarnation = self._incarnation[rank]
        if self._finished[rank] or self._process(rank).result.status is not None:
            return False
        self.group.kill(rank, incarnation=incarnation)
        return True

    def kill_at_random(self, kills: int, seed: str) -> int:
        """At any moment, in starts and replays as well: a seeded draw says who is killed and how soon the next one is.

        How many kills there were before the rank that was drawn had come to its end.
        """
        self.run_until(lambda: all(self.marked(rank, "running") for rank in range(self.size)))
        rng = random.Random(seed)
        killed = 0
        while killed < kills and self.kill(victim := rng.randrange(self.size)):
            killed += 1
            now = self.incarnation(victim)
            self.run_until(lambda victim=victim, now=now: self.incarnation(victim) != now)  # type: ignore[misc]
            self.run_for(rng.random() * 0.3)
        return killed

    def incarnation(self, rank: int) -> int:
        return self._incarnation[rank]

    def run_until(self, reached: Callable[[], bool], deadline: float = 60.0) -> None:
        """Keeps the job alive until the condition holds."""
        until = time.monotonic() + deadline
        while not reached() and not all(self._finished):
            self._step(until)

    def run_for(self, seconds: float) -> None:
        """Keeps the job alive for that long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not all(self._finished):
            running = [p for p in self.group._processes.values() if p.result.status is None]
            if wait([p.channel for p in running] + [p.pidfd for p in running], left):
                self._step(time.monotonic() + 60)

    def marked(self, rank: int, name: str) -> bool:
        return any(mark[:2] == (rank, name) for mark in self.group._marks)

    def marks(self, rank: int, name: str) -> list[Any]:
        """Their values, in the order in which the rank's processes made them."""
        return [value for who, what, value in self.group._marks if (who, what) == (rank, name)]

    def said(self, rank: int) -> str:
        """By the rank's processes, on stderr."""
        return "\n".join(process.result.log for (who, _), process in self.group._processes.items() if who == rank)

    def died_only(self, *expected: tuple[int, int]) -> None:
        """Else the error says of what the others died."""
        assert sorted(self.deaths) == [*expected], "\n".join(self._errors)

    def values(self, deadline: float = 60.0) -> list[Any]:
        """Of all ranks, when all have ended well. Nothing is left behind."""
        until = time.monotonic() + deadline
        try:
            while not all(self._finished):
                self._step(until)
            self.group.results(10.0)
        finally:
            self.close()
        return self._value

    def close(self) -> None:
        self.group.abort()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------------

    def _process(self, rank: int) -> Any:
        return self.group._processes[rank, self._incarnation[rank]]

    def _step(self, until: float) -> None:
        # Not where they ended while admissions were heard of: there may be nobody left to wait for.
        if not any(self._has_ended(rank) for rank in range(self.size)):
            self.group._step(until, f"all ranks to end (generation {self.generation}, restarts {self.restarts})")
        self._take_admissions()
        for rank in range(self.size):
            if not self._has_ended(rank):
                continue
            result: Result = self._process(rank).result
            if result.status == 0 and (rank, self._incarnation[rank]) in self._taken:
                self._member[rank] = False
                self._next_round(rank)
                self._run_again(rank)
            elif result.status == 0:
                self._finished[rank], self._value[rank], self._member[rank] = True, result.value, False
            else:
                self._replace(rank, result)
        if not any(self._member) and not all(self._finished):
            self._hear_of_admissions()
        if not any(self._member) and not all(self._finished):
            self._next_generation()

    def _has_ended(self, rank: int) -> bool:
        """Its process has, and nothing has been done about it yet."""
        return not self._finished[rank] and self._process(rank).result.status is not None and not self._is_late(rank)

    def _take_admissions(self) -> None:
        for mark in [m for m in self.group._marks if m[1] == "admitted"]:
            self.group._marks.remove(mark)
            if mark[2] == self._incarnation[mark[0]]:
                self._member[mark[0]] = True

    def _hear_of_admissions(self) -> None:
        """Of those without whom nobody can have come to the end: a thread says that they are in, maybe after they went on."""
        until = time.monotonic() + 1.0
        running = [r for r in range(self.size) if self._process(r).result.status is None]
        waits = running if any(self._finished) else []
        while waits and not any(self._member) and (left := until - time.monotonic()) > 0:
            if wait([self._process(r).channel for r in waits], left):
                self.group._step(time.monotonic() + 60, "what they say")
                self._take_admissions()
                waits = [r for r in waits if self._process(r).result.status is None]

    def _is_late(self, rank: int) -> bool:
        if rank != self._seen_late or self.deaths:
            return False
        return not all(self._round[r] > self._round[rank] and self._member[r] for r in self._fellows(rank) if r != rank)

    def _replace(self, rank: int, result: Result) -> None:
        was_member, self._member[rank] = self._member[rank], False
        last_round = self._round[rank]
        if was_member or result.status == exit_code.STARTS_AGAIN:
            self._next_round(rank)
        if result.status in CRASHES:
            raise Failed(result.text())  # its replacement would hide it
        if result.status != -signal.SIGKILL and len(self._errors) < 8:
            self._errors.append(f"rank {rank}.{self._incarnation[rank]}: {result.text()}")
        if result.status == exit_code.STARTS_AGAIN:
            self.taken_along.append((rank, self._incarnation[rank]))
        else:
            self.deaths.append((rank, self._incarnation[rank]))
            self._take_along(rank, was_member, last_round)
        if self._on_death is not None:
            self._on_death(self, rank)
        self.restarts += 1
        if self.restarts > MOST_RESTARTS:
            raise Failed(
                "\n".join(["The ranks die again and again. The first errors:", *self._errors, str(self.deaths)])
            )
        self._run_again(rank)

    def _run_again(self, rank: int) -> None:
        if any(self._member):
            self._incarnation[rank] += 1
            self._spawn(rank)

    def _fellows(self, rank: int) -> list[int]:
        groups = self._groups if isinstance(self._groups, (list, tuple)) else ()
        return next((group for group in groups if rank in group), [])

    def _next_round(self, rank: int) -> None:
        """The one that its group is in, or a new one if the process that has ended was in that."""
        self._round[rank] = max(
            self._round[rank] + 1, *(self._round[fellow] for fellow in [rank, *self._fellows(rank)])
        )

    def _take_along(self, failed: int, was_member: bool, last_round: int) -> None:
        """Those of its log group that had ended, or are about to; who goes on computing hears of it, and ends by itself.

        Who has heard of it, has ended and is back already has said nothing to the failed one: a process may close its sockets
        long before it can be reaped.
        """
        for rank in self._fellows(failed):
            if self._round[rank] > last_round:
                continue
            if self._finished[rank]:
                self._finished[rank] = False
                self._next_round(rank)
                self._run_again(rank)
            elif was_member and self._member[rank]:
                self._taken.add((rank, self._incarnation[rank]))

    def _next_generation(self) -> None:
        self.generation += 1
        for rank in range(self.size):
            if self._finished[rank]:
                continue
            if self._process(rank).result.status is None:
                self.group.kill(rank, incarnation=self._incarnation[rank])
                until = time.monotonic() + 20.0
                while self._process(rank).result.status is None:
                    self.group._step(until, f"rank {rank} to die")
            self._incarnation[rank] += 1
            self._next_round(rank)
            self._member[rank] = True
        for rank in range(self.size):
            if not self._finished[rank]:
                self._spawn(rank)

    def _spawn(self, rank: int) -> None:
        finished = ",".join(str(r) for r in range(self.size) if self._finished[r])
        generation = str(self.generation)

        def run(first: Any, context: Context) -> Any:
            return self._run(first, context)

        os.environ.update(FTCOMM_GENERATION=generation, FTCOMM_FINISHED=finished, FTCOMM_LOG_OWNER="launcher")
        try:
            self.group.spawn(rank, run, self._incarnation[rank])
        finally:
            for name in ("FTCOMM_GENERATION", "FTCOMM_FINISHED", "FTCOMM_LOG_OWNER"):
                del os.environ[name]

    def _run(self, comm: Any, context: Context) -> Any:
        """In the child."""
        tell_of_admission(comm.job, context)
        return self._program(comm, context)


def tell_of_admission(job: ftcomm.Job, context: Context) -> None:
    """A replacement is a member from then on, also if it founds the job in its predecessor's place; a founder is one already."""
    if not job.joining:
        if context.incarnation > 0:
            context.mark("admitted", context.incarnation)
        return

    def hear(event: dict[str, Any]) -> None:
        if event.get("event") == "joined" and event.get("slot") == job.rank:
            context.mark("admitted", job.incarnation)

    job.add_listener(hear)
    if job.info()["member"]:  # the event came before the listener
        context.mark("admitted", job.incarnation)
