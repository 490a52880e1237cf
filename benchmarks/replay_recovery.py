"""How soon a pipeline goes on after a stage's death: replay of one stage, against rolling all of them back to the checkpoint.

    python benchmarks/replay_recovery.py [--stages 4 8] [--lost 10 50 100] [--rounds 5] [--json FILE] [--plot FILE]
    python benchmarks/replay_recovery.py --victims first middle last --systems replay
    python benchmarks/replay_recovery.py --standby             replacements are made of standbys (ftrun --standby)
    python benchmarks/replay_recovery.py --torch               the pipeline is torch.distributed.pipelining's Schedule1F1B
    python benchmarks/replay_recovery.py --from FILE [FILE ...] --plot FILE      draws what earlier runs have written

A pipeline in 1F1B order (NumPy, one thread a stage; see _pipeline_ranks.py) takes a checkpoint; k iterations later one stage is
killed in the middle of an iteration. Measured is the time from its SIGKILL until every stage has finished the iteration after
that one:

- replay: `ftrun --policy replay`; the stage's replacement loads its checkpoint and does its k iterations again out of the logs,
  while the others wait;
- rollback: `ftrun --policy raise`, in the form that is kindest to it: the survivors keep their processes, load the checkpoint
  where they are, and meet the one replacement in a new job; all do the k iterations again;
- restart: `torchrun`, as it comes: all processes are ended and started again, load the checkpoint and do the k iterations again.

With --standby ftrun keeps as many standbys as there are victims, for replay and for rollback (torchrun has none), and the workers
wait for them before they begin.

"working" is the same time without what comes before the last new process has done its imports. The systems take turns, and each
round of each must end with the same weights, bit for bit, as the undisturbed run of that shape: else the benchmark fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from _diary import read_diaries
from _jobs import FTRUN, TORCHRUN, Broken, one_thread, run_job

SYSTEMS = ("replay", "rollback", "restart")
WARM_UP = 3  # iterations before the checkpoint
PATIENCE = 170  # seconds for a run
Row = dict[str, Any]


def launcher(system: str, stages: int, standbys: int) -> list[str]:
    if system == "restart":
        return [*TORCHRUN, "--nproc-per-node", str(stages), "--max-restarts=1"]
    policy = "replay" if system == "replay" else "raise"
    flags = ["--nproc-per-node", str(stages), "--policy", policy, "--standby", str(standbys)]
    return [*FTRUN, *flags]


def run(system: str, stages: int, lost: int, to_kill: list[int], args: argparse.Namespace) -> list[Row]:
    """What the processes of one run have noted."""
    folder = Path(tempfile.mkdtemp(prefix="replay-recovery-"))
    plan = {name: getattr(args, name) for name in ("micro_batches", "rows", "width", "layers")}
    plan |= {"system": system, "checkpoint": WARM_UP, "kill": WARM_UP + lost, "victims": to_kill}
    standbys = len(to_kill) if args.standby and system != "restart" else 0
    plan |= {"iterations": WARM_UP + lost + 2, "folder": str(folder), "standbys": standbys}
    environment = {**one_thread(folder), "PIPELINE": json.dumps(plan)}
    ranks = Path(__file__).with_name("_pipeline_torch_ranks.py" if args.torch else "_pipeline_ranks.py")
    command = [*launcher(system, stages, standbys), str(ranks)]
    try:
        run_job(command, environment, PATIENCE, f"{system}, {stages} stages")
        return read_diaries(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def digests(notes: list[Row], stages: int) -> list[str]:
    found = {note["rank"]: note["value"] for note in notes if note["what"] == "digest"}
    if set(found) != set(range(stages)):
        raise Broken(f"only ranks {sorted(found)} have come to the end")
    return [found[rank] for rank in range(stages)]


def spans(notes: list[Row], stages: int, lost: int) -> dict[str, float]:
    """Seconds from the last kill."""
    last: dict[str, int] = defaultdict(int)
    ended: dict[int, int] = {}
    for note in notes:
        if note["process"] > 0 or note["what"] == "killed":
            last[note["what"]] = max(last[note["what"]], note["when"])
        if note["what"] == "iteration" and note["number"] == WARM_UP + lost + 1:
            ended[note["rank"]] = note["when"]
    if len(ended) < stages or not last["killed"] or not last["ready"]:
        raise Broken("nobody was killed, or not all stages have gone on")
    killed, ready, end = last["killed"], last["ready"], max(ended.values())
    parts = {what: (last[what] - killed) / 1e9 for what in ("ready", "joined", "caught-up") if last[what]}
    saved = max(n["when"] for n in notes if n["what"] == "iteration" and n["number"] == WARM_UP - 1)
    healthy = (killed - saved) / 1e9
    return {"whole": (end - killed) / 1e9, "working": (end - ready) / 1e9, "healthy": healthy, **parts}


def victims(name: str, stages: int) -> list[int]:
    middle = stages // 2
    return {"first": [0], "middle": [middle], "last": [stages - 1], "neighbours": [middle - 1, middle]}[name]


def measure(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for stages in args.stages:
        for lost in args.lost:
            wanted = digests(run("undisturbed", stages, lost, [], args), stages)
            for _ in range(args.rounds):
                for system in args.systems:
                    for name in args.victims if system == "replay" else args.victims[:1]:
                        notes = run(system, stages, lost, victims(name, stages), args)
                        found = digests(notes, stages)
                        if found != wanted:
                            raise Broken(f"{system}, {stages} stages, {lost} lost: {found} instead of {wanted}")
                        rows.append(
                            {
                                "stages": stages,
                                "lost": lost,
                                "system": system,
                                "victim": name,
                                **spans(notes, stages, lost),
                            }
                        )
                if args.json:
                    args.json.write_text(json.dumps(rows))
            report(rows, stages, lost)
    return rows


def medians(rows: list[Row], stages: int, lost: int) -> dict[tuple[str, str], Row]:
    """By system and victim; with the number of rounds."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if (row["stages"], row["lost"]) == (stages, lost):
            groups[row["system"], row["victim"]].append(row)
    found = {}
    for key, group in groups.items():
        names = [name for name, value in group[0].items() if isinstance(value, float)]
        found[key] = {name: statistics.median(row[name] for row in group) for name in names} | {"rounds": len(group)}
    return found


def report(rows: list[Row], stages: int, lost: int) -> None:
    figures = medians(rows, stages, lost)
    least = min(group["rounds"] for group in figures.values())
    print(
        f"\n{stages} stages, {lost} lost iterations, medians of {least} interleaved rounds; seconds, and replay's lead"
    )
    print(f"{'':22}{'whole':>9}{'':>8}{'working':>9}{'':>8}{'ready':>9}{'joined':>9}{'caught up':>11}{'healthy':>9}")
    base = next((figure for (system, _), figure in figures.items() if system == "replay"), None)
    for (system, victim), figure in figures.items():
        line = f"{system + ', ' + victim:22}"
        for name in ("whole", "working"):
            lead = f"{figure[name] / base[name]:.2f}x" if base and system != "replay" else ""
            line += f"{figure[name]:9.3f}{lead:>8}"
        for name, width in (("ready", 9), ("joined", 9), ("caught-up", 11), ("healthy", 9)):
            line += f"{figure[name]:{width}.3f}" if name in figure else " " * width
        print(line, flush=True)


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = sorted({row["stages"] for row in rows})
    figure, axes = plt.subplots(1, len(shapes), figsize=(5.2 * len(shapes), 4), squeeze=False, layout="constrained")
    colors = {"replay": "#7b5ea7", "rollback": "#efc050", "restart": "#d1495b"}
    for axis, stages in zip(axes[0], shapes, strict=True):
        counts = sorted({row["lost"] for row in rows if row["stages"] == stages})
        by_lost = {lost: medians(rows, stages, lost) for lost in counts}
        for system in SYSTEMS:
            points = {
                lost: f for lost, m in by_lost.items() for (s, v), f in m.items() if s == system and v == "middle"
            }
            if not points:
                continue
            for name, style in (("whole", "-"), ("working", "--")):
                label = f"{system}, {'with' if name == 'whole' else 'without'} the start of processes"
                values = [points[lost][name] for lost in points]
                axis.plot(list(points), values, style, marker="o", color=colors[system], label=label)
        axis.set_title(f"{stages} stages")
        axis.set_xlabel("lost iterations")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.grid(color="#dddddd")
    axes[0][0].set_ylabel("seconds from the kill on")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--lost", type=int, nargs="+", default=[10, 50, 100], help="iterations from checkpoint to kill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--victims",
        nargs="+",
        choices=["first", "middle", "last", "neighbours"],
        default=["middle"],
        help="of replay; the others' first one (default middle)",
    )
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4, help="of each stage")
    parser.add_argument("--torch", action="store_true", help="torch.distributed.pipelining in place of NumPy")
    parser.add_argument(
        "--standby", action="store_true", help="replacements of replay and rollback are made of standbys"
    )
    parser.add_argument("--json", type=Path, help="write every single figure there")
    parser.add_argument("--plot", type=Path, help="draw the medians there (png, svg)")
    parser.add_argument("--from", dest="earlier", type=Path, nargs="+", help="measure nothing: figures of earlier runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # takes the launcher and its folder along
    try:
        if args.earlier:
            rows = [row for path in args.earlier for row in json.loads(path.read_text())]
            for stages, lost in sorted({(row["stages"], row["lost"]) for row in rows}):
                report(rows, stages, lost)
        else:
            rows = measure(args)
    except Broken as error:
        sys.exit(str(error))
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
