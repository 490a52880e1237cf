"""The launcher of strategies.py's Elastic-Horovod-like system: as horovodrun, it starts a process again that has died.

    python benchmarks/_elastic.py --ranks 4 SCRIPT [its arguments]

Not ftrun: there a replacement belongs to the job of the one that died. Here survivors leave that job, and all meet in a new one,
however long a new process takes to be there.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from ftcomm.launch.parent import die_with_launcher


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()

    def start(rank: int, number: int) -> int:
        more = {
            "RANK": str(rank),
            "WORLD_SIZE": str(args.ranks),
            "LOCAL_RANK": str(rank),
            "PROCESS_NUMBER": str(number),
        }
        command = [sys.executable, "-u", *args.command]
        environment = {**os.environ, **more}
        return subprocess.Popen(command, env=environment, preexec_fn=die_with_launcher()).pid  # noqa: PLW1509

    running = {start(rank, 0): (rank, 0) for rank in range(args.ranks)}
    while running:
        pid, status = os.wait()
        rank, number = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and number == 0:
            running[start(rank, 1)] = (rank, 1)
        elif code != 0:
            print(f"rank {rank}: exit code {code}", file=sys.stderr)
            for other in running:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
