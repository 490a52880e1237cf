"""The events of a run of 4 ranks in which rank 2 is killed and replaced, as workers and ftrun would write them."""

from __future__ import annotations

from typing import Any

START = 1000.0
DEATH = 1012.0
WHAT = "all-reduce(float32[151306], avg) #512 of communicator world"


def story() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []

    def tell(time: float, event: str, **fields: Any) -> None:
        events.append({"time": time, "event": event, **fields})

    tell(START, "job", world_size=4, ranks=[0, 1, 2, 3], policy="lossy")
    for rank in range(4):
        tell(START, "spawn", rank=rank, incarnation=0, pid=100 + rank)
        for step in range(40):
            if rank != 2 or step <= 20:
                tell(START + 4 + 0.4 * step, "step", rank=rank, incarnation=0, step=step)
    tell(DEATH, "fault", rank=2, incarnation=0, at="ring.rs.hop", do="kill")
    for rank, delay in ((0, 0.0009), (1, 0.0013), (3, 0.0011)):
        tell(DEATH + delay, "suspected", rank=rank, incarnation=0, slot=2, slot_incarnation=0, evidence="robust-futex")
        tell(
            DEATH + delay + 0.0021,
            "repaired",
            rank=rank,
            incarnation=0,
            comm="7",
            seq=512,
            ranks=[0, 1, 3],
            text=WHAT,
        )
    tell(DEATH + 0.03, "exit", rank=2, incarnation=0, pid=102, code=-9, how="killed by SIGKILL")
    tell(DEATH + 0.04, "spawn", rank=2, incarnation=1, pid=110)
    tell(START + 16.9, "join-waiting", rank=0, incarnation=0, slot=2, slot_incarnation=1)
    for rank in range(4):
        tell(START + 17.0, "joined", rank=rank, incarnation=int(rank == 2), slot=2, slot_incarnation=1)
    tell(START + 17.3, "rejoined", rank=2, incarnation=1, slot=2, step=33, bytes=1_200_000, seconds=0.004)
    for rank in range(4):
        tell(START + 17.3, "step", rank=rank, incarnation=int(rank == 2), step=33)
    for rank in range(4):
        tell(START + 21, "exit", rank=rank, incarnation=int(rank == 2), pid=100 + rank, code=0, how="exit code 0")
    return events
