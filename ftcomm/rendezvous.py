"""How the processes of a job find each other: publish an address, gather the others', start, and agree that all have.

Every key is ``JOB/rdv/PHASE/INCARNATION/RANK``, so nothing of another job or of an earlier process of a slot is read. A rank that
fails during the start writes its error into every key that others may be waiting for: all ranks then fail with its message.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from typing import Any

from ftcomm._lib import check, lib
from ftcomm.errors import ConfigError, Error, Mismatch, PeerFailure, Timeout, Unsupported
from ftcomm.job import FT_INTERRUPTED, Job, check_first, current, instance_of
from ftcomm.options import Options
from ftcomm.stores import Store
from ftcomm.stores.memory import MemoryStore
from ftcomm.torchrun import number_of_start

__all__ = ["check_world", "fail_start", "job_name", "job_of_this_start", "names_of", "start_job"]

_GOOD, _ERROR = b"+", b"!"
MAX_RANKS = 1024
_SILENT_FOR = 10.0  # seconds of waiting for others of which nothing is said


def job_name() -> str:
    """``FTCOMM_JOB``, else the launcher's id of this run, else ``"job"``."""
    name = os.environ.get("FTCOMM_JOB") or os.environ.get("TORCHELASTIC_RUN_ID") or "job"
    if len(name) > 200 or not all(map(_may_be_in_name, name)):
        raise ConfigError(f"The job name {name!r} must have at most 200 printable characters, no blank and no slash.")
    return name


def as_job_name(text: str) -> str:
    """The text without what no job's name may have, and with room for ten characters more."""
    return "".join(c if _may_be_in_name(c) else "_" for c in text)[:190]


def _may_be_in_name(c: str) -> bool:
    return c.isprintable() and not c.isspace() and c != "/"


def job_of_this_start(store: Any, rank: int, world_size: int, timeout: float) -> str:
    """Collective, under torchrun: the name of the job, and when torchrun starts all workers again that of another job.

    ``store``: the agents', which is the same in all starts.
    """
    name = job_name()
    number = number_of_start(store, name, rank, world_size, timeout)
    return f"{name}.{number}" if number else name


def incarnation_from_environment() -> int:
    """``FTCOMM_INCARNATION``: 0 for the first process of a slot, one more for each replacement."""
    text = os.environ.get("FTCOMM_INCARNATION", "0")
    if not text.isdigit() or int(text) >= 1 << 31:
        raise ConfigError(f"FTCOMM_INCARNATION={text!r} must be a number, 0 for the first process of a slot.")
    return int(text)


def start_job(
    store: Any,
    rank: int,
    world_size: int,
    options: Options | None = None,
    *,
    job: str | None = None,
    incarnation: int | None = None,
    timeout: float | None = None,
    faults: str | None = None,
) -> Job:
    """Starts this process's part of a job and returns when all ranks have started.

    Args:
        store: an ``ftcomm.stores.Store``, any torch Store, or None for a job of one rank.
        job: the job's name (default: :func:`job_name`).
        incarnation: default ``FTCOMM_INCARNATION``, else 0. Above 0 this process replaces a dead one: it links to the others
            and stays outside (``job.joining``) until a join point admits it. (Under policy ``raise`` that is an error: none
            is ever let in.)
        timeout: seconds for the whole start; default: the options' timeout.

    Raises:
        Timeout: ``missing`` names the ranks that never came.
        ConfigError: wrong arguments, or a store that still holds another run of a job of this name; under replay a second job
            after one was left.
    """
    options = options or Options()
    name = job_name() if job is None else job
    process = incarnation_from_environment()
    incarnation = process if incarnation is None else incarnation
    check_world(rank, world_size)
    if (running := current(name)) is not None:
        raise ConfigError(
            f"This process already runs job {name!r} as rank {running.rank}. Close it first, or give the second job another "
            "name (FTCOMM_JOB)."
        )
    if options.policy == "replay":
        check_first(name)
    bound = options.operation_timeout if timeout is None else timeout
    store = _as_store(store, world_size)
    instance, _ = instance_of(name, options)
    try:
        made = Job(name, rank, world_size, incarnation, options, store, faults)
    except Error as error:
        if incarnation == 0:
            fail_start(store, instance, world_size, error, rank)
        raise
    try:
        _Start(made, time.monotonic() + bound).run()
    except BaseException:
        made.close()
        raise
    group = made.log_group
    # process: under a launcher, who this is, whatever its number is in the job (a new job of a replacement begins with 0)
    more = {"log_group": list(group)} if group else {}
    made.emit("started", joining=made.joining, process=process, world_size=world_size, **more)
    return made


def check_world(rank: int, world_size: int) -> None:
    """ConfigError if there can't be such a rank."""
    if not 1 <= world_size <= MAX_RANKS:
        raise ConfigError(f"world_size={world_size} must be between 1 and {MAX_RANKS}.")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}.")


def _as_store(store: Any, world_size: int) -> Store:
    if isinstance(store, Store):
        return store
    if store is None:
        if world_size == 1:
            return MemoryStore()
        raise ConfigError(f"A job of {world_size} ranks needs a store to meet through; give store= or an init method.")
    if not all(hasattr(store, name) for name in ("get", "set", "compare_set", "check", "wait")):
        raise ConfigError(
            f"store={store!r} is no store. Give a torch Store (TCPStore, FileStore, ...) or a ftcomm.stores.Store."
        )
    from ftcomm.stores.torch_store import TorchStore

    return TorchStore(store)


class _Start:
    """One run of the protocol, of one rank."""

    def __init__(self, job: Job, deadline: float) -> None:
        self.job, self.deadline = job, deadline
        self.store: Store = job.store
        self.everybody = [rank for rank in range(job.world_size) if rank not in job.finished]

    def run(self) -> None:
        try:
            if self.job.incarnation > 0 and not self._takes_founding_slot():
                self._join()
            else:
                self._found()
            if self.job.options.policy == "replay":
                self.store.compare_set(self._begun, b"", _GOOD)  # before this process does anything that is logged
        except Error as error:
            if isinstance(error, (Mismatch, Unsupported)):
                self.job.emit("misconfigured")
            self._tell_others(error)
            raise
        self.store.release()

    # -- a founding member ---------------------------------------------------------------------------------------

    def _found(self) -> None:
        self._compare_world()
        if self.job.rank == self.everybody[0]:
            self._choose_boot()
        _failpoint("rendezvous.publish")
        self._claim(self._key("address", 0, self.job.rank), _GOOD + self._address())
        _failpoint("rendezvous.gather")
        addresses = self._gather("address", "came to the start of the job")
        boot = self._read(f"{self.job.instance}/rdv/boot")
        if self.job.incarnation > 0 and self._is_unlogged():
            check(lib()[1].ft_job_unlogged(self.job.handle))
        try:
            self._link(addresses, int.from_bytes(boot, "little"), joining=False)
        except Error:
            # Maybe only because another rank had failed before and was gone: then it has said why.
            self._raise_if_failed(self._said_by_others())
            raise
        _failpoint("rendezvous.ready")
        self._claim(self._key("ready", 0, self.job.rank), _GOOD)
        self._gather("ready", "finished the start of the job")

    def _is_unlogged(self) -> bool:
        """No process of this job has come to its end of a start, in no generation: nobody's log is missing, there is none yet.

        A job that somebody goes on with by hand may be older than its store.
        """
        if self.job.options.policy != "replay" or os.environ.get("FTCOMM_LOG_OWNER") == "user":
            return False
        return self.store.get(self._begun) is None

    @property
    def _begun(self) -> str:
        return f"{self.job.name}/rdv/begun"  # of all generations

    def _said_by_others(self) -> bytes:
        try:
            return self.store.get(self._key("ready", 0, self.job.rank)) or b""
        except Exception:  # noqa: BLE001 - the store, whosever it is, may be what has gone
            return b""

    def _compare_world(self) -> None:
        """Before anybody waits for ranks that others do not know of."""
        size, rank = self.job.world_size, self.job.rank
        mine = f"{size} {rank}".encode()
        found = self.store.compare_set(f"{self.job.instance}/rdv/world", b"", mine)
        other_size, other = map(int, (found or mine).split())
        if other_size == size:
            return
        error = Mismatch(
            f"rank {other} has world size {other_size}, rank {rank} has {size}: start all ranks with the same options",
            ranks=(rank,),
            operation="rendezvous",
        )
        fail_start(self.store, self.job.instance, max(size, other_size), error, rank)
        raise error

    def _choose_boot(self) -> None:
        key = f"{self.job.instance}/rdv/boot"
        mine = _GOOD + secrets.token_bytes(7) + b"\x01"  # never zero
        found = self.store.compare_set(key, b"", mine)
        if found != mine and self.job.incarnation == 0:  # a rank 0 that died right here has left a good one
            self._raise_if_failed(found)
            raise ConfigError(self._leftover())

    def _claim(self, key: str, value: bytes) -> None:
        """Writes a key that only this process may write; another rank's error may be there already."""
        found = self.store.compare_set(key, b"", value)
        if found != value:
            self._raise_if_failed(found)
            raise ConfigError(self._leftover())

    def _leftover(self) -> str:
        return (
            f"The store already holds a job named {self.job.name!r} with a rank {self.job.rank}: it is left over from an "
            "earlier run, or two processes have the same rank. Use a fresh store (file), give this run its own name "
            "(FTCOMM_JOB), and check RANK."
        )

    # -- a replacement -------------------------------------------------------------------------------------------

    def _takes_founding_slot(self) -> bool:
        """The process before this one died before it published anything: this one is a founding member in its place."""
        return self.store.get(self._key("address", 0, self.job.rank)) is None

    def _join(self) -> None:
        job = self.job
        if job.options.policy == "raise":
            job.emit("refused", policy="raise")  # to ftrun: another one would not be let in either
            raise ConfigError(
                f"This process replaces a dead rank {job.rank} of job {job.name!r}, and policy 'raise' takes no replacements: it "
                "would be alone. Start with --policy lossy (and a join point) or --policy replay, or without restarts "
                "(--max-restarts 0); or found a new job with the survivors: ftcomm.init(job=..., incarnation=0)."
            )
        job.emit("joining")  # to ftrun: it needs the others
        self._end_unfinished_start()
        self._gather("ready", "finished the start of the job")  # its founders; an error of theirs is ours
        boot = self._read(f"{job.instance}/rdv/boot")
        _failpoint("rendezvous.publish")
        self._claim(self._key("address", job.incarnation, job.rank), _GOOD + self._address())
        self._announce_newest()
        _failpoint("rendezvous.gather")
        addresses = {rank: self._newest_address(rank) for rank in self.everybody if rank != job.rank}
        addresses[job.rank] = self._address()
        job.joining = True
        self._link(addresses, int.from_bytes(boot, "little"), joining=True)

    def _end_unfinished_start(self) -> None:
        """The process before this one may have died after all had linked to it, and before it said so. The others wait for its
        word, which nobody but this one knows will never come.
        """
        job = self.job
        error = PeerFailure(
            f"Rank {job.rank} died at the start of job {job.name!r}, when all had linked to it: start the job again.",
            ranks=(job.rank,),
            operation="rendezvous",
        )
        value = _as_value(error)
        if self.store.compare_set(self._key("ready", 0, job.rank), b"", value) == value:
            job.emit("start-failed")
            raise error  # which tells the others

    def _announce_newest(self) -> None:
        """``newest/RANK`` only goes up: two replacements of one slot may be on their way."""
        key = f"{self.job.instance}/rdv/newest/{self.job.rank}"
        mine = b"%d" % self.job.incarnation
        seen = self.store.get(key) or b""
        while int(seen or b"0") < self.job.incarnation:
            after = self.store.compare_set(key, seen, mine)
            if after == mine:
                return
            seen = after
        raise ConfigError(
            f"A newer replacement of rank {self.job.rank} (incarnation {int(seen)}) has already come; this process, "
            f"incarnation {self.job.incarnation}, is too late and must end."
        )

    def _newest_address(self, rank: int) -> bytes:
        incarnation = int(self.store.get(f"{self.job.instance}/rdv/newest/{rank}") or b"0")
        value = self.store.get(self._key("address", incarnation, rank)) or b""
        return value[1:] if value.startswith(_GOOD) else b""

    # -- both ----------------------------------------------------------------------------------------------------

    def _key(self, phase: str, incarnation: int, rank: int) -> str:
        return _key(self.job.instance, phase, incarnation, rank)

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _address(self) -> bytes:
        ffi, C = lib()
        data, length = ffi.new("const uint8_t**"), ffi.new("size_t*")
        check(C.ft_job_address(self.job.handle, data, length))
        return bytes(ffi.buffer(data[0], length[0]))

    def _read(self, key: str) -> bytes:
        value = self.store.get(key)
        if value is None:
            raise ConfigError(
                f"The store has lost {key!r}: it was restarted or cleaned during the start. Start the job again."
            )
        self._raise_if_failed(value)
        return value[1:]

    def _gather(self, phase: str, what: str) -> dict[int, bytes]:
        keys = {self._key(phase, 0, rank): rank for rank in self.everybody}
        missing = [keys[key] for key in self.store.wait(list(keys), min(self._left(), _SILENT_FOR))]
        if missing and self._left() > 0:
            self._say_who_is_missing(missing)
            missing = [keys[key] for key in self.store.wait(list(keys), self._left())]
        if missing:
            raise Timeout(
                f"{names_of(missing)} of {self.job.world_size} never {what} {self.job.name!r} "
                "(timeout). Check that every rank was started, with the same WORLD_SIZE and address, and see its own log.",
                ranks=missing,
                operation="rendezvous",
            )
        return {rank: self._read(key) for key, rank in keys.items()}

    def _say_who_is_missing(self, missing: list[int]) -> None:
        """Once for all, and once on each node of a launcher: a host that is down may have had all of them, and nobody says so."""
        first = min(rank for rank in self.everybody if rank not in missing or rank == self.job.rank)
        if self.job.rank == first or os.environ.get("LOCAL_RANK") == "0":
            print(
                f"ftcomm: rank {self.job.rank}: waiting for {names_of(missing).lower()} of {self.job.world_size} "
                f"at the start of job {self.job.name!r}, for up to {self._left():.0f} s more",
                file=sys.stderr,
                flush=True,
            )

    def _link(self, addresses: dict[int, bytes], boot: int, joining: bool) -> None:
        ffi, C = lib()
        known = [addresses.get(rank, b"") for rank in range(self.job.world_size)]
        held = [ffi.new("uint8_t[]", address) if address else ffi.NULL for address in known]
        pointers = ffi.new("const uint8_t*[]", held)
        lengths = ffi.new("size_t[]", [len(address) for address in known])
        code = FT_INTERRUPTED
        while code == FT_INTERRUPTED:  # a signal came; its Python handler runs here, and may raise
            code = C.ft_job_start(self.job.handle, pointers, lengths, boot, int(joining), self._left())
            if code == FT_INTERRUPTED and not joining:
                # Whom this one waits for may have died on another host, which nobody sees before there are links.
                self._raise_if_failed(self._said_by_others())
        check(code)

    def _raise_if_failed(self, value: bytes) -> None:
        """For another rank, or a process before this one, as it has written: nobody comes through this start any more."""
        if not value.startswith(_ERROR):
            return
        from ftcomm import errors

        detail = json.loads(value[1:])
        kind = getattr(errors, str(detail.pop("type")), Error)
        self.job.emit("start-failed")  # to ftrun
        raise kind(detail.pop("message"), **detail)

    def _tell_others(self, error: Error) -> None:
        if not self.job.joining:
            fail_start(self.store, self.job.instance, self.job.world_size, error, self.job.rank)


def names_of(ranks: list[int]) -> str:
    """As a sentence begins with them: ``"Rank 1"``, ``"Ranks 1, 2"``."""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def fail_start(store: Store, job: str, world_size: int, error: Error, rank: int | None = None) -> None:
    """Wakes every founder that waits for a key of the start that is not written yet: the start fails with this error.

    ``rank``: where the error came up, to be named.
    """
    value = _as_value(error, rank)
    try:
        for phase in ("address", "ready"):
            for slot in range(world_size):
                store.compare_set(_key(job, phase, 0, slot), b"", value)
        store.release()
    except Exception:  # noqa: BLE001 - the store itself may be what failed; the first error is the one to report
        return


def _as_value(error: Error, rank: int | None = None) -> bytes:
    detail = error.fields()
    if rank is not None and not error.message.startswith("Rank "):
        detail["message"] = f"Rank {rank} failed at the start of the job: {error.message}"
    return _ERROR + json.dumps({"type": type(error).__name__, **detail}).encode()


def _key(job: str, phase: str, incarnation: int, rank: int) -> str:
    return f"{job}/rdv/{phase}/{incarnation}/{rank}"


def _failpoint(name: str) -> None:
    lib()[1].ft_fault_hit(name.encode())
