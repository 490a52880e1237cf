"""``ftcomm timeline run/events.jsonl -o run.png``: one lane per rank, and the moment of a failure under the glass."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftcomm.launch.folder import read_events
from ftcomm.launch.lanes import RECOVERY, Failure, Lane, State, Timeline, read_timeline
from ftcomm.launch.summary import summary

COLORS = {
    State.STARTING: "#c9d3e0",
    State.TRAINING: "#5aa469",
    State.WAITING: "#efc050",
    State.REPLAYING: "#7b5ea7",
    State.HELPING: "#b9a3d6",
    State.AGREEING: "#d1495b",
    State.REPAIRING: "#f08a5d",
    State.UNDOING: "#8c2f39",
    State.TRANSFER: "#3d7ea6",
    State.GONE: "#3b3b3b",
}
MOST_LABELLED = 8  # failures; with more, labels would cover each other
BAR = 0.56


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="ftcomm timeline", description="Draws who was doing what, when.")
    parser.add_argument("events", nargs="+", type=Path, help="events.jsonl of a run folder (several: of several nodes)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("timeline.png"), help="png, svg or pdf (timeline.png)"
    )
    args = parser.parse_args(argv)
    try:
        timeline = read_timeline(event for path in args.events for event in read_events(path))
        draw(timeline, args.output)
    except (OSError, ValueError) as error:
        print(f"ftcomm timeline: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"ftcomm timeline: {error}; drawing needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    print(f"wrote {args.output}")
    for line in summary(timeline):
        print(line)
    return 0


def draw(timeline: Timeline, path: Path) -> None:
    """Writes the picture; its kind goes by the suffix of ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Under replay the others wait until a process has started and run: nothing that needs enlarging.
    zoomed = None if timeline.policy == "replay" else _first_to_show(timeline)
    height = 0.62 * len(timeline.lanes)
    ratios = [height + 1.0] + ([height + 0.6] if zoomed else [])
    figure, axes = plt.subplots(
        len(ratios),
        1,
        figsize=(12, sum(ratios) + 1.5),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": ratios},
    )
    _draw_run(axes[0][0], timeline)
    if zoomed is not None:
        _draw_failure(axes[1][0], timeline, zoomed)
        _connect(figure, axes[0][0], axes[1][0], (zoomed.time - timeline.start))
    policy = f", policy {timeline.policy}" if timeline.policy else ""
    deaths = len(timeline.failures)
    figure.suptitle(
        f"{len(timeline.lanes)} ranks, {deaths or 'no'} failure{'' if deaths == 1 else 's'}{policy}: "
        "what each rank was doing",
        fontsize=14,
        fontweight="bold",
    )
    _legend(figure, timeline)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_run(axis: Any, timeline: Timeline) -> None:
    length = max(timeline.end - timeline.start, 1e-3)
    _bars(axis, timeline.lanes, timeline.start, 1.0, least=length / 600)
    if len(timeline.failures) <= MOST_LABELLED:
        for index, lane in enumerate(timeline.lanes):
            _label(axis, index, lane, timeline.start, length)
    axis.set_xlim(0, length * 1.005)
    axis.set_xlabel("seconds since the start of the run")


def _label(axis: Any, index: int, lane: Lane, start: float, length: float) -> None:
    """Texts above the lane, from left to right; one that would cover its neighbour moves up a line."""
    reach: list[float] = []  # where the text on each line ends
    for mark in sorted(lane.marks, key=lambda m: m.time):
        x = mark.time - start
        width = len(mark.text) * length / 150
        left = min(x, length - width)
        line = next((i for i, end in enumerate(reach) if left > end), len(reach))
        if line == len(reach):
            reach.append(0.0)
        reach[line] = left + width
        axis.plot([x, x], [index - BAR / 2 - 0.06 - 0.2 * line, index + BAR / 2], color="black", lw=0.8)
        plate = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.4}  # over the neighbour's line
        axis.text(left, index - BAR / 2 - 0.08 - 0.2 * line, f" {mark.text}", fontsize=8.5, va="bottom", bbox=plate)


def _draw_failure(axis: Any, timeline: Timeline, failure: Failure) -> None:
    """The milliseconds around one death, on an axis of their own."""
    span = max(failure.end - failure.time, 5e-4)
    left, right = failure.time - 0.25 * span, failure.end + 0.35 * span
    _bars(axis, timeline.lanes, failure.time, 1000.0, least=span)
    for index, lane in enumerate(timeline.lanes):
        if lane.rank == failure.rank:
            axis.text(
                span * 20,
                index,
                f"rank {lane.rank}: {failure.text}" if failure.known else f"rank {lane.rank}: first noticed here",
                color="white",
                fontsize=9,
                va="center",
            )
            continue
        noticed, repaired = failure.noticed.get(lane.rank), failure.repaired.get(lane.rank)
        if noticed is not None:
            after = "noticed after" if failure.known else "noticed at"
            _moment(axis, index, 1000 * (noticed - failure.time), after, "", "right")
        if repaired is not None:
            share = f", {failure.contributors} of {len(timeline.lanes)} contribute" if failure.contributors else ""
            _moment(axis, index, 1000 * (repaired - failure.time), "repaired after", share, "left")
    axis.set_xlim(1000 * (left - failure.time), 1000 * (right - failure.time))
    how = f", noticed by {failure.evidence}" if failure.evidence else ""
    axis.set_xlabel(
        f"milliseconds since rank {failure.rank}'s death{how}: the same run, enlarged {_times(timeline, span)} times"
    )


def _moment(axis: Any, index: int, x: float, before: str, after: str, side: str) -> None:
    """A line across the lane with its text on one side of it."""
    axis.plot([x, x], [index - BAR / 2 - 0.12, index + BAR / 2], color="black", lw=1, zorder=4)
    axis.text(x, index - BAR / 2 - 0.1, f" {before} {x:.2f} ms{after} ", fontsize=8.5, va="bottom", ha=side)


def _times(timeline: Timeline, span: float) -> str:
    return f"{(timeline.end - timeline.start) / (1.6 * span):,.0f}"


def _bars(axis: Any, lanes: list[Lane], zero: float, scale: float, least: float) -> None:
    for index, lane in enumerate(lanes):
        for span in lane.spans:
            width = span.end - span.start
            if scale == 1.0 and span.state in RECOVERY:
                width = max(width, least)  # a few milliseconds: drawn wide enough to be seen at all
            axis.barh(
                index,
                width * scale,
                left=(span.start - zero) * scale,
                height=BAR,
                color=COLORS[span.state],
                edgecolor="none",
                zorder=2 + (span.state in RECOVERY),
            )
    axis.set_yticks(range(len(lanes)), [f"rank {lane.rank}" for lane in lanes], fontsize=11)
    axis.set_ylim(len(lanes) - 0.5, -0.95)
    axis.grid(axis="x", color="#dddddd", zorder=0)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _connect(figure: Any, run: Any, enlarged: Any, x: float) -> None:
    """Two thin lines from the moment in the run to the edges of its enlargement."""
    from matplotlib.patches import ConnectionPatch

    for edge in (0.0, 1.0):
        figure.add_artist(
            ConnectionPatch(
                xyA=(x, run.get_ylim()[0]),
                coordsA=run.transData,
                xyB=(edge, 1.0),
                coordsB=enlarged.transAxes,
                color="#888888",
                lw=0.8,
                ls=":",
            )
        )


def _legend(figure: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    used = {span.state for lane in timeline.lanes for span in lane.spans}
    figure.legend(
        handles=[Patch(color=COLORS[state], label=timeline.text(state)) for state in State if state in used],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=10,
    )


def _first_to_show(timeline: Timeline) -> Failure | None:
    """The first failure that a survivor recovered from; one that nobody noticed has nothing to enlarge."""
    return next((f for f in timeline.failures if f.noticed), None)


if __name__ == "__main__":
    sys.exit(main())
