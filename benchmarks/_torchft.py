"""torchft as a benchmark's peer: its launcher here, and its side of a worker. The use is that of its own example, train_ddp.py.

    python benchmarks/_torchft.py --ranks 4 --heartbeat-timeout-ms 5000 SCRIPT [its arguments]

starts a lighthouse and, as torchft's README has it, one torchrun for each replica group of one worker, which starts a worker
again that died. torchft is no dependency: `pip install torchft`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

# isort: split
from _diary import process_number
from _jobs import TORCHRUN

from ftcomm.launch.parent import die_with_launcher

HEARTBEAT_TIMEOUT = 5000  # milliseconds; torchft_lighthouse's default
SETTINGS = {"torchft": HEARTBEAT_TIMEOUT, "torchft-fast": 500}


def available() -> bool:
    return importlib.util.find_spec("torchft") is not None


def without_missing(systems: list[str]) -> list[str]:
    """Says so if torchft was asked for and is not there."""
    if available() or not set(systems) & set(SETTINGS):
        return systems
    print("torchft cannot be imported (pip install torchft): its rows are left out", file=sys.stderr)
    return [system for system in systems if system not in SETTINGS]


def launcher(ranks: int, heartbeat_timeout_ms: int = HEARTBEAT_TIMEOUT) -> list[str]:
    me = str(Path(__file__).resolve())
    return [sys.executable, me, "--ranks", str(ranks), "--heartbeat-timeout-ms", str(heartbeat_timeout_ms)]


class Worker:
    """A replica group of one: model and optimizer, wrapped."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        import torch
        from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
        from torchft.checkpointing.pg_transport import PGTransport

        class Ddp(DistributedDataParallel):  # type: ignore[misc]
            """torchft 0.2.0's own hook asserts what only an all-reduce that went well has, so a death ends all survivors. This
            one waits for the all-reduce as that does; the manager has noted a failure, and does not commit the step."""

            @staticmethod
            def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no others than its own annotations
                state.allreduce(bucket.buffer()).wait()
                done: Any = torch.futures.Future()
                done.set_result(bucket.buffer())
                return done

        def load(state: dict[str, Any]) -> None:
            self.ddp.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optim"])

        def state() -> dict[str, Any]:
            return {"model": self.ddp.state_dict(), "optim": self.optimizer.state_dict()}

        if process_number() == 0:
            # Who is first would else train alone, as soon as the lighthouse's join timeout of 10 s is over: its quorum is one.
            store = torch.distributed.FileStore(os.environ["TMPDIR"] + "/all-are-there")
            store.set(str(rank()), "")
            store.wait([str(number) for number in range(int(os.environ["REPLICA_GROUPS"]))])
        group = ProcessGroupGloo(timeout=timedelta(seconds=5))
        self.manager = Manager(
            pg=group,
            min_replica_size=1,
            load_state_dict=load,
            state_dict=state,
            replica_id=f"benchmark_{rank()}",
            timeout=timedelta(seconds=30),
            checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
        )
        self.ddp: Any = Ddp(self.manager, module)
        self.optimizer: Any = Optimizer(self.manager, optimizer)


def rank() -> int:
    return int(os.environ["REPLICA_GROUP_ID"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--heartbeat-timeout-ms", type=int, default=HEARTBEAT_TIMEOUT)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    from torchft.coordination import LighthouseServer

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # What torchft_lighthouse runs, with the README's values, at a free port.
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        quorum_tick_ms=100,
        join_timeout_ms=10000,
        heartbeat_timeout_ms=args.heartbeat_timeout_ms,
    )
    groups = []
    try:
        for number in range(args.ranks):
            more = {"REPLICA_GROUP_ID": str(number), "TORCHFT_LIGHTHOUSE": lighthouse.address()}
            more["REPLICA_GROUPS"] = str(args.ranks)
            how = ["--nproc-per-node", "1", "--max-restarts", "1000"]
            environment = {**os.environ, **more}
            told = die_with_launcher(signal.SIGTERM)
            groups.append(subprocess.Popen([*TORCHRUN, *how, *args.command], env=environment, preexec_fn=told))  # noqa: PLW1509
        return max(abs(group.wait()) for group in groups)
    finally:
        for group in groups:
            group.terminate()  # torchrun ends its worker first
        for group in groups:
            group.wait()
        lighthouse.shutdown()


if __name__ == "__main__":
    sys.exit(main())
