"""One worker process: how it is started, signalled and swept away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ftcomm.launch.parent import die_with_launcher

# From the command, the environment and the descriptors for stdout and stderr: a standby that has become this worker, or None.
Take = Callable[[Sequence[str], dict[str, str], int, int], "subprocess.Popen[bytes] | None"]


AGAIN = 5.0  # seconds


class Worker(SubprocessHandler):  # type: ignore[misc]
    """A worker that dies with ftrun and whose log files survive its replacement."""

    def __init__(self, *, stdout: str | None, stderr: str | None, take: Take, **rest: Any) -> None:
        self._take = take
        self.was_standby = False
        self.kills = 0
        self._killed_at = 0.0
        self._kill_at: float | None = None
        # The base class would open the logs with "w", which wipes what the previous incarnation wrote.
        self._log_paths = (stdout, stderr)
        super().__init__(stdout=None, stderr=None, **rest)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        out, err = self._log_paths
        self._stdout = open(out, "a") if out else None  # noqa: SIM115
        self._stderr = open(err, "a") if err else None  # noqa: SIM115
        ours = [file.fileno() if file else fd for fd, file in ((1, self._stdout), (2, self._stderr))]
        standby = self._take(args, env, *ours)
        if standby is not None:
            self.was_standby = True
            return standby
        return subprocess.Popen(
            args,
            env=env,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
            preexec_fn=die_with_launcher(),  # noqa: PLW1509 - two system calls, no lock
        )

    @property
    def pid(self) -> int:
        return int(self.proc.pid)

    def send(self, sig: signal.Signals) -> None:
        """Signals the worker alone: a notice must not reach its DataLoader workers, which it needs to finish the step."""
        if self.proc.returncode is None:  # not Popen.send_signal: it may reap the worker behind our back
            os.kill(self.pid, sig)

    def reap(self) -> int | None:
        """The exit status if the worker has ended, with its forked children swept away; None while it runs."""
        if self.proc.returncode is not None:
            return int(self.proc.returncode)
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        if ended.si_code != os.CLD_EXITED or ended.si_status != 0:
            # Not yet reaped, so the number of its process group can't have been taken by anybody else.
            self._kill_group()
        code = int(self.proc.wait())
        for log in (self._stdout, self._stderr):
            if log is not None:
                log.close()
        return code

    def has_ended(self) -> bool:
        """Whether it is dead, reaped or not."""
        return self.proc.returncode is not None or (
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def kill(self) -> None:
        """SIGKILL to the worker and everything it forked."""
        if self.proc.returncode is None:
            if self.kills == 0:
                self.kills, self._killed_at = 1, time.monotonic()
            self._strike()

    def let_end(self, until: float) -> None:
        """It is ending, with an exit code of its own, and is killed if it still runs then."""
        if self._kill_at is None:
            self._kill_at = until

    @property
    def ends_by_itself(self) -> bool:
        return self._kill_at is not None

    def kill_again(self) -> None:
        """At :meth:`again_at`."""
        self.kills += 1
        self._killed_at = time.monotonic()
        self._strike()

    def again_at(self) -> float | None:
        """When to look again whether it has ended, or died of its kill: one that sleeps in the kernel (a driver) does not."""
        if self.proc.returncode is not None:
            return None
        return self._killed_at + AGAIN if self.kills else self._kill_at

    def _strike(self) -> None:
        self._kill_group()
        os.kill(self.pid, signal.SIGKILL)  # not reaped, so the number is its own, whatever became of its group

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def describe_state(pid: int) -> str:
    """What the kernel says of a process that should be dead."""
    wanted = ("State", "PPid", "NSpgid", "NSsid", "SigPnd", "ShdPnd")
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            found = dict(line.rstrip("\n").split(":\t", 1) for line in file if line.startswith(wanted))
        with open(f"/proc/{pid}/wchan", encoding="utf-8") as file:
            found["wchan"] = file.read()
    except OSError as error:
        return f"/proc says nothing: {error}"
    return ", ".join(f"{name} {value}" for name, value in found.items())


def describe_exit(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
