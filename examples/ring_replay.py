"""A ring of ft_send and ft_recv whose result is the same, bit for bit, whatever is killed whenever.

    ftrun --policy replay --nproc-per-node 4 --events run examples/ring_replay.py
    ftrun --policy replay --nproc-per-node 4 --events run --max-restarts 9 \\
        --faults "rank=1,at=channel.receive:30,do=kill; rank=1.1,at=channel.receive:60,do=kill" \\
        examples/ring_replay.py
    ftcomm timeline run/events.jsonl -o ring.png

Each rank passes a vector on, adds what it gets to its own, and now and then all take the average. A killed process is
started again, runs this same code from the top, and is fed from the logs until it has caught up; the others wait just as
long as they need it. (Ring all-reduce with pairwise commit logs: Grover and Rajagopal 2022; the picture is like their
figures 9 and 10.)
"""

from __future__ import annotations

import hashlib
import os
import time

import numpy as np

import ftcomm

STEPS = int(os.environ.get("STEPS", "120"))


def main() -> None:
    comm = ftcomm.init()
    successor, predecessor = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine = np.random.default_rng(comm.rank).standard_normal(250_000).astype(np.float32)
    arrived = np.empty_like(mine)
    for step in range(STEPS):
        ftcomm.ft_send(mine, successor)
        ftcomm.ft_recv(arrived, predecessor)
        mine += np.float32(0.5) * arrived
        if step % 10 == 9:
            ftcomm.ft_all_reduce(mine, "avg")
        mine *= np.float32(0.7)
        time.sleep(0.02)  # the work of a real program, so that there is something to see
    digest = hashlib.sha256(mine.tobytes()).hexdigest()[:16]
    print(f"rank {comm.rank}, process {comm.job.incarnation}: {digest}", flush=True)
    comm.leave()


if __name__ == "__main__":
    main()
