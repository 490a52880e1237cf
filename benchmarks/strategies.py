"""Recovery of a data-parallel run, and what being ready for it costs: SWIFT's section 7.1, figure 8a, on this machine.

    python benchmarks/strategies.py [--rounds 5] [--json FILE] [--plot FILE]
    python benchmarks/strategies.py --systems replication elastic      some of them
    python benchmarks/strategies.py --quick                            one round with batches of 2: does everything work?
    python benchmarks/strategies.py --backend ftcomm                   the restarted systems over ftcomm in place of gloo
    python benchmarks/strategies.py --from FILE [FILE ...] --plot FILE draws what earlier runs have written

Four ranks train a ResNet-18 (--model gpt: a GPT of 11 million parameters) with AdamW. As in the paper a checkpoint is made at
iteration 100, snapshots every 30 iterations, and rank 1 dies at the begin of iteration 150, before the snapshot that is due
there: the most that can be lost between snapshots. Iterations before 95 are left out, for nothing depends on them. Systems:

- replication, rollback, lossy: the engine of ftcomm.recovery under ftrun, no checkpoints at all;
- replay: the engine under `--policy replay`; all ranks write a checkpoint, the averages since then are in the log, and the
  replacement does its 50 lost iterations again out of it, while the others wait (a model whose replicas are wholly equal takes a
  living one's state: `--model gpt`; the ResNet's batch normalisation differs from rank to rank);
- checkpoint: global checkpointing; torch.save by rank 0 while the others wait, torchrun starts all again, 50 iterations lost;
- checkfreq: snapshots in memory, copied while the next forward and backward pass run, written to disk in the background;
  torchrun starts all again, 30 iterations lost;
- elastic: as Elastic Horovod; each rank has snapshots in memory (copied in the same way, as in the paper), survivors keep their
  processes, put theirs back, meet the replacement in a new job of ftcomm, and repeat 30 iterations. Over ftcomm, not over gloo,
  which is kinder: it says at once that somebody is dead, and meets again sooner;
- torchft, torchft-fast: torchft as in its own train_ddp.py, with gloo, where torchft can be imported; a lighthouse with its
  default of 5 s until a silent replica is dead, and with 500 ms.

*recovery* is SWIFT's: from when the last new process is ready (imports, model and optimizer behind it) until it begins the
iteration that the victim died in, or a later one. Its parts, and what comes before it, from the kill on: *detection*, until the
last new process is started; *start*, until it is ready; *state*, until it begins an iteration; *again*, the lost iterations.
*next step* is from the kill until all survivors, or those who came after them, have committed their next step. *iteration* is the
mean of those from the checkpoint to the kill, so that there is one checkpoint in 50; with snapshots, of the last 30, of which
the first makes one. Two more systems are plain DDP over gloo and over ftcomm (policy raise), where nobody dies.

A round goes through all systems in an order drawn by lot. A run counts only if it went right: the same bits as undisturbed
(replication, replay), the right number of updates and undisturbed's loss (global checkpointing and snapshots), equal replicas
(the others). One that did not is told of and counted as failed. The undisturbed runs to compare with are made once, before all
rounds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import _torchft
from _comparison import PLAIN, Row, add_arguments, iteration, measured_or_earlier, picture, report, rows_of, spans
from _diary import read_diaries
from _jobs import FTRUN, Broken, one_thread, restarting, run_job

ENGINES = ("replication", "rollback", "lossy", "replay")
EXACT = ("replication", "replay")  # with the very bits of an undisturbed run
REPEATING = ("checkpoint", "checkfreq", "elastic")
TORCHFT = _torchft.SETTINGS
SYSTEMS = (*ENGINES, *REPEATING, *TORCHFT)
RANKS, VICTIM = 4, 1
FIRST, CHECKPOINT, SNAPSHOT, EVERY, KILL = 95, 100, 120, 30, 150
PATIENCE = 240  # seconds for a run


def launcher(system: str, backend: str) -> list[str]:
    if system in TORCHFT:
        return _torchft.launcher(RANKS, TORCHFT[system])
    if system in ENGINES:
        policy = "replay" if system == "replay" else "lossy"
        return [*FTRUN, "--nproc-per-node", str(RANKS), "--policy", policy, "--max-restarts", "1"]
    if system == "elastic":
        return [sys.executable, str(Path(__file__).with_name("_elastic.py")), "--ranks", str(RANKS)]
    return restarting(RANKS, backend)


def first_of(system: str) -> int:
    """The first iteration. Under replay a checkpoint follows every so many iterations, and the next one must not come before the
    death: so it is one more than there are from the checkpoint to the kill."""
    return CHECKPOINT - (KILL + 1 - CHECKPOINT) if system == "replay" else FIRST


def run(system: str, dies: bool, args: argparse.Namespace, within: Path) -> list[Row]:
    """What the processes of one run have noted."""
    folder = Path(tempfile.mkdtemp(prefix=f"{system}-", dir=within))
    name, _, plain_backend = system.partition("-")
    backend = plain_backend if name == "plain" else "ftcomm" if system == "elastic" else args.backend
    plan = {"system": name, "backend": backend, "folder": str(folder)}
    plan |= {"model": args.model, "batch": args.batch}
    plan |= {"first": first_of(system), "checkpoint": CHECKPOINT, "every": EVERY, "kill": KILL}
    plan |= {"victim": VICTIM if dies else -1, "last": KILL + 1}
    command = launcher(system, backend)
    command.append(str(Path(__file__).with_name("_strategies_ranks.py")))
    try:
        run_job(command, {**one_thread(folder), "STRATEGY": json.dumps(plan)}, PATIENCE, system)
        return read_diaries(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ends(notes: list[Row], system: str, at: int | None) -> dict[str, Any]:
    """What rank 0's replica is at the end of iteration ``at``, or at the last one; all ranks have to hold the same."""
    found = {note["rank"]: note for note in notes if note["what"] == "end" and at in (None, note["number"])}
    if len(found) < RANKS or len({(note["number"], note["digest"]) for note in found.values()}) > 1:
        raise Broken(f"{system}: not all ranks have the same replica at the end: {found}")
    return found[0]


def check(system: str, notes: list[Row], undisturbed: list[Row]) -> None:
    if system not in REPEATING and system not in EXACT:
        ends(notes, system, None)
        return
    wanted, found = ends(undisturbed, system, KILL + 1), ends(notes, system, KILL + 1)
    # A process that starts again has its first buckets again, which sum in another order: not the same bits.
    same = found["digest"] == wanted["digest"] if system in EXACT else abs(found["loss"] - wanted["loss"]) < 0.05
    if not same or found["updates"] != [KILL + 2 - first_of(system)]:
        raise Broken(f"{system}: {found} instead of {wanted}")


def compared_with(args: argparse.Namespace, within: Path) -> dict[str, list[Row]]:
    """Undisturbed runs: of replication and replay for their bits, of plain DDP for the others' loss."""
    wanted = ["plain-gloo"] if set(args.systems) & set(REPEATING) else []
    wanted += [system for system in args.systems if system in EXACT]
    return {system: run(system, False, args, within) for system in wanted}


def measure(args: argparse.Namespace, within: Path) -> list[Row]:
    undisturbed = compared_with(args, within)

    def once(system: str) -> Row:
        notes = run(system, system not in PLAIN, args, within)
        row: Row = {}
        if system not in PLAIN:
            check(system, notes, undisturbed.get(system, undisturbed.get("plain-gloo", [])))
            row = spans(system, notes, RANKS, VICTIM, KILL, CHECKPOINT if system in (*REPEATING, "replay") else None)
        # replay's checkpoint is made as soon as the iteration before has been noted, or before that
        first = SNAPSHOT if system in ("checkfreq", "elastic") else CHECKPOINT - (system == "replay")
        return row | {"iteration": iteration(system, notes, first, KILL - 1)}

    return rows_of(args, [*PLAIN, *args.systems], once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--backend", choices=["gloo", "ftcomm"], default="gloo", help="of checkpoint and checkfreq")
    parser.add_argument("--model", choices=["resnet", "gpt"], default="resnet", help="a state of 134 or 131 MB")
    parser.add_argument(
        "--batch", type=int, default=4, help="of each rank: pictures, or texts of 256 bytes (default 4)"
    )
    parser.add_argument("--quick", action="store_true", help="one round, batches of 2")
    args = parser.parse_args()
    args.systems = _torchft.without_missing(args.systems)
    if args.quick:
        args.rounds, args.batch = 1, 2
    rows = measured_or_earlier(args, measure)
    report(rows, SYSTEMS, ENGINES)
    if args.plot:
        picture(rows, SYSTEMS, "plain DDP", args.plot)
    if any("failed" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
