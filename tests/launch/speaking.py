"""Workers that only say what real ones would: under the policy replay, most of them."""

from __future__ import annotations

from collections.abc import Callable

from launch.running import Ftrun

WORKER = """
import json, os, signal, sys, time
rank, incarnation = int(os.environ["RANK"]), int(os.environ["FTCOMM_INCARNATION"])
generation, finished = int(os.environ.get("FTCOMM_GENERATION", 0)), os.environ.get("FTCOMM_FINISHED")
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def event(name, **fields):
    with open(f"{os.environ['FTCOMM_EVENTS']}/events-{rank}-{incarnation}.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), "rank": rank, "incarnation": incarnation, "event": name, **fields}) + "\\n")
def joined(slot, slot_incarnation): event("joined", slot=slot, slot_incarnation=slot_incarnation)
def wait(name): return open(f"{os.environ['WORK']}/{name}").read()
def tell(name): open(f"{os.environ['WORK']}/{name}", "w").close()
def me(): say(rank, incarnation, generation, os.getpid(), finished or "-")
"""


Replay = Callable[..., Ftrun]


def lines(run: Ftrun, count: int) -> dict[int, list[str]]:
    """What ``me()`` has said, by rank: incarnation, generation, pid, finished."""
    return {int(line.split()[0]): line.split()[1:] for line in run.read_lines(count)}
