"""Recovery of a data-parallel run, and what being ready for it costs: SWIFT's section 7.1, figure 8a, on this machine.

    python benchmarks/strategies.py [--rounds 5] [--json FILE] [--plot FILE]
    python benchmarks/strategies.py --systems replication elastic      some of them
    python benchmarks/strategies.py --quick                            one round with the smallest batches: does everything work?
    python benchmarks/strategies.py --backend ftcomm                   the restarted systems over ftcomm in place of gloo
    python benchmarks/strategies.py --from FILE [FILE ...] --plot FILE draws what earlier runs have written

Four ranks train a ResNet-18 (--model gpt: a GPT of 11 million parameters) with AdamW. As in the paper a checkpoint is made at
iteration 100, snapshots every 30 iterations, and rank 1 dies at the begin of iteration 150, before the snapshot that is due
there: the most that can be lost between snapshots. Iterations before 95 are left out, for nothing depends on them. Systems:

- replication, rollback, lossy: the engine of ftcomm.recovery under ftrun, no checkpoints at all;
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
(replication), the right number of updates and undisturbed's loss (those that repeat iterations), equal replicas (the others). One
that did not is told of and counted as failed. The undisturbed runs to compare with are made once, before all rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import _torchft
from _diary import read_diaries
from _jobs import FTRUN, TORCHRUN_GLOO, Broken, all_tidied, one_thread, run_job
from _strategies_plot import PARTS, draw

ENGINES = ("replication", "rollback", "lossy")
REPEATING = ("checkpoint", "checkfreq", "elastic")
TORCHFT = _torchft.SETTINGS
SYSTEMS = (*ENGINES, *REPEATING, *TORCHFT)
RANKS, VICTIM = 4, 1
FIRST, CHECKPOINT, SNAPSHOT, EVERY, KILL = 95, 100, 120, 30, 150
PLAIN = ("plain-gloo", "plain-ftcomm")
PATIENCE = 170  # seconds for a run
Row = dict[str, Any]


def launcher(system: str, backend: str) -> list[str]:
    ranks = ["--nproc-per-node", str(RANKS)]
    if system in TORCHFT:
        return _torchft.launcher(RANKS, TORCHFT[system])
    if system in ENGINES:
        return [*FTRUN, *ranks, "--policy", "lossy", "--max-restarts", "1"]
    if system == "elastic":
        return [sys.executable, str(Path(__file__).with_name("_elastic.py")), "--ranks", str(RANKS)]
    if backend == "ftcomm":
        return [*FTRUN, *ranks, "--policy", "raise", "--max-restarts", "1"]
    return [*TORCHRUN_GLOO, *ranks, "--max-restarts=1"]


def run(system: str, dies: bool, args: argparse.Namespace, within: Path) -> list[Row]:
    """What the processes of one run have noted."""
    folder = Path(tempfile.mkdtemp(prefix=f"{system}-", dir=within))
    name, _, plain_backend = system.partition("-")
    backend = plain_backend if name == "plain" else "ftcomm" if system == "elastic" else args.backend
    plan = {"system": name, "backend": backend, "folder": str(folder)}
    plan |= {"model": args.model, "batch": args.batch}
    plan |= {"first": FIRST, "checkpoint": CHECKPOINT, "every": EVERY, "kill": KILL}
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
    if system not in REPEATING and system != "replication":
        ends(notes, system, None)
        return
    wanted, found = ends(undisturbed, system, KILL + 1), ends(notes, system, KILL + 1)
    # A process that starts again has its first buckets again, which sum in another order: not the same bits.
    same = (
        found["digest"] == wanted["digest"] if system == "replication" else abs(found["loss"] - wanted["loss"]) < 0.05
    )
    if not same or found["updates"] != [KILL + 2 - FIRST]:
        raise Broken(f"{system}: {found} instead of {wanted}")


def spans(system: str, notes: list[Row]) -> Row:
    """Seconds."""
    killed = [note["when"] for note in notes if note["what"] == "killed"]
    ready = [note["when"] for note in notes if note["what"] == "ready" and note["process"]]
    if len(killed) != 1 or not ready:
        raise Broken(f"{system}: nobody was killed, or nobody came instead")
    later = [note for note in notes if note.get("number", -1) >= KILL and note["when"] > killed[0]]
    back: dict[int, int] = {}
    done: dict[int, int] = {}
    for note in sorted(later, key=lambda note: note["when"]):
        if note["what"] == "begins" and note["process"]:
            back.setdefault(note["rank"], note["when"])
        if note["what"] == "iteration" and note["rank"] != VICTIM:
            done.setdefault(note["rank"], note["when"])
    if not back or len(done) < RANKS - 1:
        raise Broken(f"{system}: the run has not gone on")
    new = [note for note in notes if note["process"]]
    first: dict[int, int] = {}
    for note in new:
        if note["what"] == "begins":
            first[note["rank"]] = min(note["when"], first.get(note["rank"], note["when"]))
    moments = [killed[0], max(n["when"] for n in new if n["what"] == "born"), max(ready)]
    # The others come back where the run is; torchft's replacement begins an iteration that it takes no part in.
    moments += [max((first if system in REPEATING else back).values()), max(back.values())]
    return {
        **{part: (after - before) / 1e9 for part, before, after in zip(PARTS, moments, moments[1:], strict=False)},
        "recovery": (max(back.values()) - max(ready)) / 1e9,
        "next step": (max(done.values()) - killed[0]) / 1e9,
    }


def iteration(system: str, notes: list[Row]) -> float:
    """Seconds."""
    ended: dict[int, int] = {}
    for note in notes:
        if note["what"] == "iteration" and note["rank"] == 0 and not note["process"]:
            ended.setdefault(note["number"], note["when"])  # elastic's survivors do some of them again
    first = SNAPSHOT if system in ("checkfreq", "elastic") else CHECKPOINT
    if not {first - 1, KILL - 1} <= set(ended):
        raise Broken(f"{system}: rank 0 was not in the run from the begin")
    return (ended[KILL - 1] - ended[first - 1]) / (KILL - first) / 1e9


def compared_with(args: argparse.Namespace, within: Path) -> dict[str, list[Row]]:
    """Undisturbed runs: of replication for its bits, of plain DDP for the others' loss."""
    wanted = ["plain-gloo"] if set(args.systems) & set(REPEATING) else []
    wanted += [system for system in args.systems if system == "replication"]
    return {system: run(system, False, args, within) for system in wanted}


def measure(args: argparse.Namespace, within: Path) -> list[Row]:
    rows: list[Row] = []
    undisturbed = compared_with(args, within)
    lot = random.Random(args.seed)
    for number in range(args.rounds):
        systems = [*PLAIN, *args.systems]
        for system in lot.sample(systems, len(systems)):
            row: Row = {"system": system, "round": number}
            try:
                notes = run(system, system not in PLAIN, args, within)
                if system not in PLAIN:
                    check(system, notes, undisturbed.get(system, undisturbed.get("plain-gloo", [])))
                    row |= spans(system, notes)
                row["iteration"] = iteration(system, notes)
            except Broken as error:
                row = {"system": system, "round": number, "failed": str(error)}
            rows.append(row)
            print(" ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows))
    return rows


def in_order(rows: list[Row]) -> dict[str, list[Row]]:
    """Each system's rows that count; a system of which all have failed has none."""
    return {
        system: [row for row in rows if row["system"] == system and "failed" not in row]
        for system in (*PLAIN, *SYSTEMS)
        if any(row["system"] == system for row in rows)
    }


def told(values: list[float], digits: int) -> str:
    """Median, and smallest to largest."""
    if not values:
        return ""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def over(rows: list[Row], base: list[Row]) -> list[float]:
    """The throughput of each round over that of the other system in the same round."""
    of_round = {row["round"]: row["iteration"] for row in base}
    return [of_round[row["round"]] / row["iteration"] for row in rows if row["round"] in of_round]


def report(rows: list[Row]) -> None:
    found = in_order(rows)
    ours = statistics.median([row["recovery"] for row in found.get("replication", [])] or [float("nan")])
    rounds = 1 + max(row["round"] for row in rows)
    print(
        f"\n{rounds} rounds; median (smallest-largest); seconds, an iteration in milliseconds; its parts are medians\n"
    )
    print(
        "| system | runs | recovery | replication is shorter by | detection + start + state + again | next step | iteration "
        "| throughput over plain-gloo | over plain-ftcomm |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for system, group in found.items():
        of_all = sum(row["system"] == system for row in rows)
        runs = f"{len(group)}" if len(group) == of_all else f"failed {of_all - len(group)} of {of_all}"
        cells = [""] * 4
        if group and system not in PLAIN:
            recovery = [row["recovery"] for row in group]
            less = 100 * (1 - ours / statistics.median(recovery))
            parts = " + ".join(f"{statistics.median(row[part] for row in group):.2f}" for part in PARTS)
            shorter = "" if system in ENGINES or less != less else f"{less:.1f} %"
            cells = [told(recovery, 3), shorter, parts, told([row["next step"] for row in group], 3)]
        cells.append(told([1e3 * row["iteration"] for row in group], 1))
        cells += [told(over(group, found.get(base, [])), 3) for base in PLAIN]
        print(f"| {system} | {runs} | {' | '.join(cells)} |")
    for row in rows:
        if "failed" in row:
            print(f"\nround {row['round']}: {row['failed'].splitlines()[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--backend", choices=["gloo", "ftcomm"], default="gloo", help="of checkpoint and checkfreq")
    parser.add_argument("--model", choices=["resnet", "gpt"], default="resnet", help="a state of 134 or 131 MB")
    parser.add_argument(
        "--batch", type=int, default=4, help="of each rank: pictures, or texts of 256 bytes (default 4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the systems")
    parser.add_argument("--quick", action="store_true", help="one round, batches of 1")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    parser.add_argument("--plot", type=Path, help="draw the medians there (png, svg)")
    parser.add_argument("--from", dest="earlier", type=Path, nargs="+", help="measure nothing: figures of earlier runs")
    args = parser.parse_args()
    args.systems = _torchft.without_missing(args.systems)
    if args.quick:
        args.rounds, args.batch = 1, 1
    if args.earlier:
        rows = [row for path in args.earlier for row in json.loads(path.read_text())]
    else:
        with all_tidied() as folder:
            try:
                rows = measure(args, folder)
            except Broken as error:
                sys.exit(f"no undisturbed run to compare with: {error}")
    report(rows)
    if args.plot:
        draw(
            in_order(rows),
            {system: over(group, in_order(rows).get("plain-gloo", [])) for system, group in in_order(rows).items()},
            args.plot,
        )
    if any("failed" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
