"""One process's membership of a job: the native node, its threads and its events.

Made by :func:`ftcomm.rendezvous.start_job`; communicators (also torch's process groups) are created in it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ftcomm import exit_code
from ftcomm._calls import gate
from ftcomm._lib import check, last_error, lib
from ftcomm.arguments import real
from ftcomm.errors import Closed, ConfigError, Error
from ftcomm.events import EventFile, event_folders
from ftcomm.options import POLICIES, Options
from ftcomm.request import Request
from ftcomm.stores.callbacks import StoreCallbacks

__all__ = ["Job", "current", "leave_all"]

FT_INTERRUPTED = 8
FT_STALE_WITH_GROUP = 2  # ft_job_stale

_jobs: dict[str, Job] = {}  # by job name; several only in tests and in programs that start several
_left: list[str] = []  # jobs under the policy replay that this process has said goodbye to
_registry_lock = threading.Lock()
_forks = 0  # between the first process and this one; asked in every call, where getpid would be a system call


def _on_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_on_fork)


def instance_of(name: str, options: Options) -> tuple[str, frozenset[int]]:
    """What a start of this job is called in its store, and the ranks that have finished before it."""
    generation, finished = generation_from_environment() if options.policy == "replay" else (0, ())
    return f"{name}~{generation}" if generation else name, frozenset(finished)


def begin_step(job: Job, step: int) -> None:
    """A training step begins: told, and a place for failpoints."""
    job.emit("step", step=step)
    lib()[1].ft_fault_step(step)


class Job:
    """Owns an ``ft_job``. ``start_job`` returns it started.

    Attributes:
        name: unique per job.
        instance: the name with the generation (policy replay: all ranks may have died and started again); part of every
            store key.
        finished: ranks that had ended well before this generation started.
        rank, world_size, incarnation: this process's slot; incarnation 0 is the first process of a slot.
        options: the job's :class:`Options`.
        joining: True for a replacement, until a join point admits it.
        needed: the others can't go on without this rank: if an exception ends the process that is a death, and no goodbye.
        store: the store that it met the others through, or None.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        incarnation: int,
        options: Options,
        store: Any = None,
        faults: str | None = None,
    ) -> None:
        _, C = lib()
        self.name, self.rank, self.world_size, self.incarnation = name, rank, world_size, incarnation
        self.options, self.store, self.joining, self.needed = options, store, False, False
        self.made: dict[int, str] = {}  # communicators that are open, but for torch's groups
        self.instance, self.finished = instance_of(name, options)
        self._pid, self._forks = os.getpid(), _forks
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        folders = event_folders(options.events)
        self._events = EventFile(folders, rank, incarnation) if folders else None
        self._keep: list[Any] = []  # what the native side points to
        self._users: list[Callable[[], None]] = []  # native code that has the handle
        self._handle: Any = None
        self._leaving = False

        try:
            self._create(faults)
        except BaseException as error:
            if isinstance(error, ConfigError):
                self.emit("misconfigured")  # to ftrun: whoever is started in this one's place finds the same
            if self._events is not None:
                self._events.close()
            raise
        if self._events is None:
            # Nobody listens yet, and each event would be read under the interpreter lock while this rank recovers.
            C.ft_job_tell(self._handle, 0)
        self.gate = gate(self.pointer)
        self._users.append(self.gate.close)
        with _registry_lock:
            _jobs[name] = self

    def _create(self, faults: str | None) -> None:
        ffi, C = lib()
        options, store = self.options, self.store
        secret = options.secret.encode() if options.secret else b""
        config = ffi.new("ft_job_config*")
        config.job = self._text(self.instance)
        config.rank, config.world_size, config.incarnation = self.rank, self.world_size, self.incarnation
        config.heartbeat, config.timeout = options.heartbeat, options.operation_timeout
        config.transport, config.authority = self._text(options.transport), self._text(options.authority)
        config.policy = POLICIES.index(options.policy)
        config.interface_, config.host = self._text(options.interface), self._text(options.host)
        if secret:
            config.secret, config.secret_len = self._held(ffi.new("uint8_t[]", secret)), len(secret)
        config.faults = self._text(os.environ.get("FTCOMM_FAULTS") if faults is None else faults)
        if store is not None and getattr(store, "durable", True):
            config.store = self._held(StoreCallbacks(store)).struct
        if options.policy == "replay":
            self._log_in(config)
        self._on_event = ffi.callback("void(void*, const char*)", self._native_event)
        config.on_event = self._on_event
        out = ffi.new("ft_job**")
        check(C.ft_job_create(config, out))
        self._handle = out[0]

    def _log_in(self, config: Any) -> None:
        """Policy replay: where the logs are, and whose it is to remove them."""
        exit_code.watch()
        ffi, C = lib()
        owner = os.environ.get("FTCOMM_LOG_OWNER")
        # Of several runs beside each other those that nobody uses are removed, unless they have an owner.
        common = ffi.string(C.ft_logs_place()).decode()
        own = f"/dev/shm/ftcomm-log-{os.getuid()}-{self.name}"
        folder = self.options.log_dir or (own if owner in ("launcher", "user") else common)
        config.log_dir, config.log_job = self._text(os.path.abspath(folder)), self._text(self.name)
        config.log_limit = self.options.log_limit
        if self.options.log_spill:
            config.log_spill = self._text(os.path.abspath(self.options.log_spill))
        config.log_durability = int(self.options.durability == "host")
        config.log_remove = int(owner not in ("launcher", "user"))
        config.log_late = int(self.options.log_mode == "async")
        config.log_scope = self._text(self.options.log_scope)
        flags = [int(rank in self.finished) for rank in range(self.world_size)]
        config.finished = self._held(ffi.new("uint8_t[]", flags))

    def _held(self, thing: Any) -> Any:
        self._keep.append(thing)
        return thing

    def _text(self, text: str | None) -> Any:
        ffi, _ = lib()
        # A path may have any bytes, which Python shows as surrogates.
        return ffi.NULL if not text else self._held(ffi.new("char[]", text.encode(errors="surrogateescape")))

    # -- the handle ----------------------------------------------------------------------------------------------

    @property
    def handle(self) -> Any:
        """The cffi ``ft_job*``; raises Closed after close() and in a forked child."""
        if self._handle is None:
            raise Closed(f"Job {self.name!r} was closed. Call ftcomm.init() again for a new one.")
        if _forks != self._forks:
            raise Closed(
                f"Job {self.name!r} belongs to the parent process {self._pid}: a forked child can't use its "
                "communicators. Start a job of its own in the child, or communicate in the parent."
            )
        return self._handle

    @property
    def pointer(self) -> int:
        """The ``ft_job*`` as an integer, for other native bindings."""
        ffi, _ = lib()
        return int(ffi.cast("uintptr_t", self.handle))

    @property
    def closed(self) -> bool:
        """Whether the job was left or closed."""
        return self._handle is None

    # -- queries -------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Goes up by one with each change of the membership."""
        return int(lib()[1].ft_job_epoch(self.handle))

    @property
    def stale(self) -> bool:
        """True once this rank was voted out; it can only exit."""
        return bool(lib()[1].ft_job_stale(self.handle))

    def alive(self) -> tuple[int, ...]:
        """Ranks (slots) in the job's present view."""
        return self._ranks("ft_job_alive")

    def waiting(self) -> tuple[int, ...]:
        """Ranks (slots) whose replacement asks to come in at the next join point."""
        return self._ranks("ft_job_waiting")

    @property
    def log_group(self) -> tuple[int, ...]:
        """Policy replay: the ranks that start again together, as messages between them are not logged. Empty: all are logged."""
        return tuple(self.info().get("log_group", ()))

    def info(self) -> dict[str, Any]:
        """What the native side tells about itself: transports, authority, counters."""
        ffi, C = lib()
        size = 4096
        while True:
            out = ffi.new("char[]", size)
            check(C.ft_job_info(self.handle, out, size))
            text = ffi.string(out).decode()
            if len(text) + 1 < size:
                return json.loads(text)  # type: ignore[no-any-return]
            size *= 4

    def _ranks(self, function: str) -> tuple[int, ...]:
        ffi, C = lib()
        flags = ffi.new("uint8_t[]", self.world_size)
        check(getattr(C, function)(self.handle, flags))
        return tuple(rank for rank, flag in enumerate(flags) if flag)

    # -- join ----------------------------------------------------------------------------------------------------

    def join_wait(self) -> Request:
        """For a replacement: done when the others have admitted it, at a point where all of them call :meth:`admit`.

        ``request.wait().contributors`` are the ranks (slots) of the job from then on.
        """
        return self._request("ft_join_wait", "join of job " + self.name)

    def admit(self) -> Request:
        """Collective, of all living ranks of the job, between operations: the waiting replacements come in.

        ``request.wait().contributors`` are the ranks (slots) of the job from then on.
        """
        return self._request("ft_admit", "admission to job " + self.name)

    def _request(self, function: str, operation: str) -> Request:
        return Request(self, self.world_size, None, operation).post(getattr(lib()[1], function), self.handle)

    # -- events --------------------------------------------------------------------------------------------------

    def emit(self, event: str, **fields: Any) -> None:
        """Writes one line of this rank to the events file (if there is one) and tells the listeners."""
        self._tell({"event": event, **fields})

    def add_listener(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """``listener(event)`` for each event, on whatever thread it comes up; it must not block."""
        self._listeners.append(listener)
        if self._handle is not None:
            lib()[1].ft_job_tell(self._handle, 1)

    def _native_event(self, _context: Any, text: Any) -> None:
        event = json.loads(lib()[0].string(text).decode("utf-8", "replace"))
        kind = str(event.pop("kind", "unknown")).replace("_", "-")
        if kind != "stale" or not self._leaving:  # the others are quick to go on without it, as it has asked for
            self._tell({"event": kind, **event})
        if kind == "stale":
            self._end_with_group()

    def _tell(self, event: dict[str, Any]) -> None:
        if self._events is not None:
            self._events.write({"job": self.name, **event})
        for listener in tuple(self._listeners):
            listener(event)

    # -- end -----------------------------------------------------------------------------------------------------

    def leave(self, timeout: float | None = None) -> None:
        """Says goodbye, waits until no other rank needs this one, and closes.

        The wait ends by itself after two heartbeats of silence, or after ``timeout`` seconds. While the others vote on what
        became of an operation, whose result this rank may have to give them, it goes on, for 16 heartbeats at most. The others
        go on without waiting for a timeout. Communicators of the job can't be used afterwards.
        """
        if self._handle is None or os.getpid() != self._pid:
            return
        deadline = None if timeout is None else time.monotonic() + real("timeout", timeout, "a number of seconds")
        if self.options.policy == "replay":
            _left.append(self.name)
        self._leaving = True
        last_word = ""
        try:
            code = FT_INTERRUPTED
            while code == FT_INTERRUPTED:  # a signal came; its Python handler runs here, and may raise
                left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
                code = lib()[1].ft_job_leave(self.handle, left)
            if code != 0:
                error = last_error(code)
                exit_code.end_with_group(error)
                raise error
            if self.options.policy == "replay":
                last_word = "goodbye"  # to ftrun: from here on nobody needs this process
        finally:
            self._close(last_word)

    def leave_at_exit(self) -> None:
        """:meth:`leave`, or :meth:`close` for a process that fails under ``replay``."""
        if self.options.policy != "replay":
            if self.needed and self._handle is not None and exit_code.failed():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)  # of an uncaught exception; without a log even close() is a goodbye
            self.leave()
            return
        self._end_with_group()  # the event may still be on its way
        if exit_code.failed():
            # To ftrun: the others see a death, and this process lives for a while, and says why it failed.
            self.emit("ending")
            self.close()
        else:
            try:
                self.leave()
            except Error as error:  # its replacement has to do it again: this process has not succeeded
                print(f"ftcomm: rank {self.rank}: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    def close(self) -> None:
        """Frees everything, without a goodbye: to the others it looks like a death. Use leave() for a planned end."""
        self._close()

    def _close(self, last_word: str = "") -> None:
        handle, self._handle = self._handle, None
        with _registry_lock:
            if _jobs.get(self.name) is self:
                del _jobs[self.name]
        if handle is None or os.getpid() != self._pid:
            return
        self._tell_missed_faults()
        for let_go in self._users:
            let_go()
        lib()[1].ft_job_close(handle)
        if last_word:  # after all native events: of who has let its successors in, before it said goodbye
            self.emit(last_word)
        if self._events is not None:
            self._events.close()
        if self.store is not None:
            self.store.close()

    def before_close(self, let_go: Callable[[], None]) -> None:
        """``let_go`` is called before the handle is freed, by whoever closes the job."""
        self._users.append(let_go)

    def _end_with_group(self) -> None:
        """Policy replay: one of this rank's log group has died, and all of it start again. At once, as by a signal: what this
        process would still do, its replacement does."""
        if self._handle is not None and lib()[1].ft_job_stale(self._handle) == FT_STALE_WITH_GROUP:
            os._exit(exit_code.STARTS_AGAIN)

    def _tell_missed_faults(self) -> None:
        """A fault that was asked for and never came is not to look like one that was survived."""
        ffi, C = lib()
        for missed in json.loads(ffi.string(C.ft_fault_missed()).decode()):
            self.emit("fault-missed", **missed)
            if self._events is None:  # else whoever reads them tells it
                text = missed_fault({"rank": self.rank, **missed})
                print(f"ftcomm: {text}", file=sys.stderr, flush=True)


def generation_from_environment() -> tuple[int, tuple[int, ...]]:
    """``FTCOMM_GENERATION`` and ``FTCOMM_FINISHED``: set by the launcher when all ranks had to start again (policy replay)."""
    text = os.environ.get("FTCOMM_GENERATION", "0")
    ranks = os.environ.get("FTCOMM_FINISHED", "")
    if not text.isdigit() or not all(part.isdigit() for part in ranks.split(",") if ranks):
        raise ConfigError(
            f"FTCOMM_GENERATION={text!r} and FTCOMM_FINISHED={ranks!r} must be a number and a list of ranks."
        )
    return int(text), tuple(int(part) for part in ranks.split(",") if part)


def missed_fault(event: Mapping[str, Any]) -> str:
    """The event ``fault-missed`` in words."""
    since = f" from step {event['step']} on" if "step" in event else ""
    passes = "" if event["at"].startswith("step:") else f" (passed {event['passes']} times)"
    return f"rank {event['rank']}: fault at {event['at']}{since} was never reached{passes}"


def current(name: str | None = None) -> Job | None:
    """This process's job (of that name), or None."""
    jobs = [job for job in _jobs.values() if not job.closed and (name is None or job.name == name)]
    return jobs[-1] if jobs else None


def check_first(name: str) -> None:
    """Raises ConfigError if this process, under the policy replay, has left another job before ``name``."""
    if _left:
        raise ConfigError(
            f"This process has left job {_left[-1]!r} and can't start job {name!r}: under replay a replacement does all of "
            f"it again, and nobody is in {_left[-1]!r} any more to let it in. Keep one job (init_process_group, ftcomm.init) for "
            "the whole run; inside it new_group, split and dup make as many groups as are needed."
        )


def leave_all() -> None:
    """What happens at exit: a goodbye of every job that is still open.

    Under ``replay`` a process that fails says none: it would wait for the others, who need what it has not done. To them it
    dies, and is started again.
    """
    for job in tuple(_jobs.values()):
        try:
            job.leave_at_exit()
        except Exception:  # noqa: BLE001 - at exit there is nobody to tell; close() has run in leave's finally
            continue


def _forget_in_child() -> None:
    _jobs.clear()
    _left.clear()


atexit.register(leave_all)
os.register_at_fork(after_in_child=_forget_in_child)
