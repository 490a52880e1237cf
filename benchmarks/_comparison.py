"""What strategies.py and parallel_recovery.py share: rounds of systems in an order drawn by lot, SWIFT's measures, their table.

A rank notes "born", when its process started; "ready", when it has imports, model and optimizer behind it and is about to turn
to the others; "killed"; with an iteration's number "begins", when it is about to compute it, and "iteration", when its update is
done.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _jobs import Broken, all_tidied
from _strategies_plot import PARTS, draw

PLAIN = ("plain-gloo", "plain-ftcomm")  # the same training with nothing against failures; nobody dies
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the systems")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    parser.add_argument("--plot", type=Path, help="draw the medians there (png, svg)")
    parser.add_argument("--from", dest="earlier", type=Path, nargs="+", help="measure nothing: figures of earlier runs")


def rows_of(args: argparse.Namespace, systems: list[str], once: Callable[[str], Row]) -> list[Row]:
    """What ``once`` finds for each system in each round, or why it failed."""
    rows: list[Row] = []
    lot = random.Random(args.seed)
    for number in range(args.rounds):
        for system in lot.sample(systems, len(systems)):
            row: Row = {"system": system, "round": number}
            try:
                row |= once(system)
            except Broken as error:
                row["failed"] = str(error)
            rows.append(row)
            print(" ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows))
    return rows


def measured_or_earlier(
    args: argparse.Namespace, measure: Callable[[argparse.Namespace, Path], list[Row]]
) -> list[Row]:
    """Of the files that ``--from`` names, or what ``measure`` finds; it is given a folder for its work."""
    if args.earlier:
        return [row for path in args.earlier for row in json.loads(path.read_text())]
    with all_tidied() as folder:
        try:
            return measure(args, folder)
        except Broken as error:
            sys.exit(f"no undisturbed run to compare with: {error}")


def spans(system: str, notes: list[Row], ranks: int, victim: int, kill: int, again_from: int | None) -> Row:
    """Seconds.

    Args:
        kill: iteration that the victim died in.
        again_from: lost iterations are done again from this one on, or from a later one; None: nothing is done again.
    """
    killed = [note["when"] for note in notes if note["what"] == "killed"]
    new = [note for note in notes if note["process"]]
    ready = [note["when"] for note in new if note["what"] == "ready"]
    if len(killed) != 1 or not ready:
        raise Broken(f"{system}: nobody was killed, or nobody came instead")
    later = [note for note in notes if note.get("number", -1) >= kill and note["when"] > killed[0]]
    back: dict[int, int] = {}
    done: dict[int, int] = {}
    for note in sorted(later, key=lambda note: note["when"]):
        if note["what"] == "begins" and note["process"]:
            back.setdefault(note["rank"], note["when"])
        if note["what"] == "iteration" and note["rank"] != victim:
            done.setdefault(note["rank"], note["when"])
    if not back or len(done) < ranks - 1:
        raise Broken(f"{system}: the run has not gone on")
    # Who repeats nothing comes back where the run is; torchft's replacement begins an iteration that it takes no part in. Under
    # replay each process does the run's first step before all others: it belongs to its joining.
    first: dict[int, int] = {}
    for note in new:
        if again_from is not None and note["what"] == "begins" and note["number"] >= again_from:
            first[note["rank"]] = min(note["when"], first.get(note["rank"], note["when"]))
    moments = [killed[0], max(n["when"] for n in new if n["what"] == "born"), max(ready)]
    moments += [max((first or back).values()), max(back.values())]
    return {
        **{part: (after - before) / 1e9 for part, before, after in zip(PARTS, moments, moments[1:], strict=False)},
        "recovery": (max(back.values()) - max(ready)) / 1e9,
        "next step": (max(done.values()) - killed[0]) / 1e9,
    }


def iteration(system: str, notes: list[Row], first: int, last: int) -> float:
    """Seconds: the mean of these iterations, both counted."""
    ended: dict[int, int] = {}
    for note in notes:
        if note["what"] == "iteration" and note["rank"] == 0 and not note["process"]:
            ended.setdefault(note["number"], note["when"])  # elastic's survivors do some of them again
    if not {first - 1, last} <= set(ended):
        raise Broken(f"{system}: rank 0 was not in the run from the begin")
    return (ended[last] - ended[first - 1]) / (last + 1 - first) / 1e9


def in_order(rows: list[Row], systems: tuple[str, ...]) -> dict[str, list[Row]]:
    """Each system's rows that count; a system of which all have failed has none."""
    return {
        system: [row for row in rows if row["system"] == system and "failed" not in row]
        for system in (*PLAIN, *systems)
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


def report(rows: list[Row], systems: tuple[str, ...], ours: tuple[str, ...]) -> None:
    """Prints the table; the first of ``ours`` is what all but ``ours`` are compared with."""
    found = in_order(rows, systems)
    best = statistics.median([row["recovery"] for row in found.get(ours[0], [])] or [float("nan")])
    rounds = 1 + max(row["round"] for row in rows)
    print(
        f"\n{rounds} rounds; median (smallest-largest); seconds, an iteration in milliseconds; its parts are medians\n"
    )
    print(
        f"| system | runs | recovery | {ours[0]} is shorter by | detection + start + state + again | next step | iteration "
        "| throughput over plain-gloo | over plain-ftcomm |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for system, group in found.items():
        of_all = sum(row["system"] == system for row in rows)
        runs = f"{len(group)}" if len(group) == of_all else f"failed {of_all - len(group)} of {of_all}"
        cells = [""] * 4
        if group and system not in PLAIN:
            recovery = [row["recovery"] for row in group]
            less = 100 * (1 - best / statistics.median(recovery))
            parts = " + ".join(f"{statistics.median(row[part] for row in group):.2f}" for part in PARTS)
            shorter = "" if system in ours or less != less else f"{less:.1f} %"
            cells = [told(recovery, 3), shorter, parts, told([row["next step"] for row in group], 3)]
        cells.append(told([1e3 * row["iteration"] for row in group], 1))
        cells += [told(over(group, found.get(base, [])), 3) for base in PLAIN]
        print(f"| {system} | {runs} | {' | '.join(cells)} |")
    for row in rows:
        if "failed" in row:
            print(f"\nround {row['round']}: {row['failed'].splitlines()[0]}")


def picture(rows: list[Row], systems: tuple[str, ...], training: str, path: Path) -> None:
    found = in_order(rows, systems)
    throughput = {system: over(group, found.get("plain-gloo", [])) for system, group in found.items()}
    draw(found, throughput, training, path)
