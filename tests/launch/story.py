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
        tell(DEATH + delay + 0.001, "decided", rank=rank, incarnation=0, comm="7", text=WHAT)
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


REPLAY_DEATHS = (1012.0, 1025.0)  # of ranks 2 and 1


def replay_story() -> list[dict[str, Any]]:
    """Under the policy replay: rank 2 is killed, later rank 1, then all at once; rank 3 had finished by then."""
    events: list[dict[str, Any]] = []

    def tell(time: float, event: str, **fields: Any) -> None:
        events.append({"time": time, "event": event, **fields})

    def ftrun(time: float, event: str, **fields: Any) -> None:
        tell(time, event, source="ftrun", **fields)

    def dies(time: float, rank: int, pid: int) -> None:
        others = [other for other in range(4) if other != rank]
        for other in others:
            tell(time + 0.001, "suspected", rank=other, incarnation=int(time > REPLAY_DEATHS[0] and other == 2), slot=rank,
                 slot_incarnation=0, evidence="pidfd")  # fmt: skip
            tell(time + 0.002, "frozen", rank=other, incarnation=int(time > REPLAY_DEATHS[0] and other == 2), comm="7")
        ftrun(time + 0.03, "exit", rank=rank, incarnation=0, pid=pid, code=-9, how="killed by SIGKILL", waiting=others)
        ftrun(time + 0.04, "spawn", rank=rank, incarnation=1, pid=pid + 10)
        tell(time + 4, "started", rank=rank, incarnation=1, joining=True)
        tell(time + 4, "frozen", rank=rank, incarnation=1, comm="7")
        for other in others:
            incarnation = int(time > REPLAY_DEATHS[0] and other == 2)
            tell(time + 4.1, "joined", rank=other, incarnation=incarnation, slot=rank, slot_incarnation=1)
            tell(time + 4.2, "decided", rank=other, incarnation=incarnation, comm="7", attempt=4097)
        tell(time + 4.2, "decided", rank=rank, incarnation=1, comm="7", attempt=4097)
        text = "12 results and 30 sends were in the log"
        tell(time + 6, "caught-up", rank=rank, incarnation=1, comm="7", seq=12, text=text)
        tell(
            time + 6.1,
            "caught-up",
            rank=rank,
            incarnation=1,
            comm="8",
            seq=2,
            text="2 results and 0 sends were in the log",
        )

    ftrun(START, "job", world_size=4, ranks=[0, 1, 2, 3], policy="replay")
    for rank in range(4):
        ftrun(START, "spawn", rank=rank, incarnation=0, pid=100 + rank)
        tell(START + 4, "started", rank=rank, incarnation=0, joining=False)
    dies(REPLAY_DEATHS[0], 2, 102)
    dies(REPLAY_DEATHS[1], 1, 101)
    ftrun(START + 35, "exit", rank=3, incarnation=0, pid=103, code=0, how="exit code 0")
    for n, (rank, incarnation) in enumerate(((0, 0), (1, 1), (2, 1))):
        how = {"pid": 100, "code": -9, "how": "killed by SIGKILL", "waiting": [2] if n < 2 else []}
        ftrun(START + 36 + n / 1000, "exit", rank=rank, incarnation=incarnation, **how)
    ftrun(START + 36.1, "generation", generation=1, ranks=[0, 1, 2], finished=[3])
    for rank, incarnation in ((0, 1), (1, 2), (2, 2)):
        ftrun(START + 36.1, "spawn", rank=rank, incarnation=incarnation, pid=120 + rank, generation=1)
        tell(START + 40, "started", rank=rank, incarnation=incarnation, joining=False)
        tell(START + 43 + rank / 10, "caught-up", rank=rank, incarnation=incarnation, comm="7", seq=40,
             text="40 results and 90 sends were in the log")  # fmt: skip
        ftrun(START + 50, "exit", rank=rank, incarnation=incarnation, pid=120 + rank, code=0, how="exit code 0")
    return events
