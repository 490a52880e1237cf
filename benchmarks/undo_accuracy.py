"""Does undoing an update harm the model? SWIFT's figure 11: training to its end with failures in the middle of updates.

    python benchmarks/undo_accuracy.py [--seeds 5] [--failures 10] [--json FILE] [--plot FILE]
    python benchmarks/undo_accuracy.py --model gpt --seeds 3          a small GPT on the sources of Python's standard library
    python benchmarks/undo_accuracy.py --from FILE --plot FILE        draws what an earlier run has written

A CNN learns scikit-learn's handwritten digits (1257 to train on, 540 to test on) with SGD with momentum and with AdamW, in steps
of an optimizer for each parameter. In some iterations, drawn by lot, the update is ended by a failure after a part of the
parameters, drawn by lot: what was updated is undone with ftcomm.recovery.Undo, and the whole update is done then, as survivors
do. The failure is a stop at that place, in one process; nobody is killed. Runs:

- none: no failure;
- exact: exact undo; its weights must be none's, bit for bit, else the benchmark fails;
- plain: the inverse of the step, off by rounding;
- rounded: no failure, but in the same iterations the weights are moved by one rounding, as any other order of sums would: what
  plain undo is to be compared with, as training makes small differences large;
- kept: what was updated is not undone, so that a part of the model is updated twice: what undo is for.

Printed are, over the seeds, the median of the test accuracy (gpt: of the loss of held-out text) and its largest distance from
none's of the same seed, and the largest relative difference of the final weights, of norms of whole tensors. No time is measured.
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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ftcomm.recovery import Undo

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import pipeline_replay
import train_digits

KINDS = ("none", "exact", "plain", "rounded", "kept")
OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-4),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
Batch = Callable[[int], tuple[Tensor, Tensor]]


class Digits:
    score = "accuracy on the test images, %"

    def __init__(self, seed: int) -> None:
        self.images, self.labels, *self.test = train_digits.load()
        self.model, self.seed = train_digits.build(), seed
        spoil(self.model, seed)

    def loss(self, step: int) -> Tensor:
        inputs, targets = train_digits.batch_of(step, self.seed, self.images, self.labels, 32)
        return F.cross_entropy(self.model(inputs), targets)

    def evaluate(self) -> float:
        found = 100 * train_digits.accuracy(self.model, *self.test)
        self.model.train()
        return found


class Gpt:
    score = "loss on held-out text"

    def __init__(self, seed: int) -> None:
        text = pipeline_replay.text()
        self.train, self.held, self.seed = text[:-100_000], text[-100_000:], seed
        torch.manual_seed(seed)
        self.model = pipeline_replay.layers_of(0, 1, 2)

    def loss(self, step: int) -> Tensor:
        return self._loss(*pipeline_replay.batch_of(1_000_000 * self.seed + step, self.train, 16))

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            found = self._loss(*pipeline_replay.batch_of(0, self.held, 64)).item()
        self.model.train()
        return found

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())


def spoil(model: nn.Module, seed: int) -> None:
    """Other weights to begin with for each seed."""
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]


def failures(seed: int, steps: int, number: int, parameters: int) -> dict[int, int]:
    """By iteration: how many parameters are updated when somebody dies; none in the first quarter."""
    draw = random.Random(seed)
    return {step: draw.randrange(1, parameters) for step in draw.sample(range(steps // 4, steps), number)}


def train(args: argparse.Namespace, optimizer: str, kind: str, seed: int) -> dict[str, Any]:
    task: Any = {"digits": Digits, "gpt": Gpt}[args.model](seed)
    parameters = list(task.model.parameters())
    optimizers = [OPTIMIZERS[optimizer]([p]) for p in parameters]
    undo = Undo(optimizers, exact=kind == "exact") if kind in ("exact", "plain") else None
    fails = {} if kind == "none" else failures(seed, args.steps, args.failures, len(parameters))
    curve = []
    for step in range(args.steps):
        torch.manual_seed(1_000_000 * seed + step)  # dropout
        task.loss(step).backward()
        if step in fails and kind == "rounded":
            with torch.no_grad():
                for p in parameters:
                    p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
        elif step in fails:
            for one in optimizers[: fails[step]]:
                one.step()
            if undo is not None:
                undo.undo()
        for one in optimizers:
            one.step()
        if undo is not None:
            undo.forget()
        for one in optimizers:
            one.zero_grad()
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            curve.append((step + 1, task.evaluate()))
    weights = [p.detach().clone() for p in parameters]
    return {"curve": curve, "weights": weights, "fails": sorted(fails)}


def off(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for optimizer in args.optimizers:
        for seed in range(1, args.seeds + 1):
            runs = {kind: train(args, optimizer, kind, seed) for kind in KINDS}
            none = runs["none"]["weights"]
            if not all(torch.equal(a, b) for a, b in zip(none, runs["exact"]["weights"], strict=True)):
                raise SystemExit(f"{optimizer}, seed {seed}: exact undo does not end with the same bits")
            for kind, run in runs.items():
                where = {"model": args.model, "optimizer": optimizer, "seed": seed, "kind": kind}
                rows.append({**where, "off": off(run["weights"], none), "curve": run["curve"], "fails": run["fails"]})
        report([row for row in rows if row["optimizer"] == optimizer])
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    last = {(row["kind"], row["seed"]): row["curve"][-1][1] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    fails = max(len(row["fails"]) for row in rows)
    score = {"digits": Digits, "gpt": Gpt}[rows[0]["model"]].score
    optimizer = rows[0]["optimizer"]
    print(f"\n{optimizer}, {rows[0]['curve'][-1][0]} iterations, {fails} failures, {len(seeds)} seeds\n")
    print(f"| undo | {score}: median | farthest from none's | weights off by |\n|---|---|---|---|")
    for kind in KINDS:
        values = [last[kind, seed] for seed in seeds]
        far = max((last[kind, seed] - last["none", seed] for seed in seeds), key=abs)
        weights = max(row["off"] for row in rows if row["kind"] == kind)
        print(f"| {kind} | {statistics.median(values):.3f} | {far:+.3f} | {weights:.1e} |", flush=True)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    figure, axes = plt.subplots(
        1, len(optimizers), figsize=(5.2 * len(optimizers), 4), squeeze=False, layout="constrained"
    )
    styles = {"none": ("#333333", "-", 3.0), "exact": ("#efc050", "-", 1.2), "plain": ("#7b5ea7", "--", 1.2)}
    styles["rounded"] = ("#3b8ea5", "-.", 1.2)
    styles["kept"] = ("#d1495b", ":", 1.2)
    for axis, optimizer in zip(axes[0], optimizers, strict=True):
        mine = [row for row in rows if row["optimizer"] == optimizer]
        for kind, (color, style, width) in styles.items():
            curves = [row["curve"] for row in mine if row["kind"] == kind]
            values = [statistics.median(curve[i][1] for curve in curves) for i in range(len(curves[0]))]
            axis.plot([step for step, _ in curves[0]], values, style, color=color, linewidth=width, label=kind)
        for step in mine[-1]["fails"]:
            axis.axvline(step, color="#d1495b", linewidth=0.5, alpha=0.5)
        axis.set_title(f"{optimizer}; failures of the last seed are marked")
        axis.set_xlabel("iteration")
        axis.grid(color="#dddddd")
    axes[0][0].set_ylabel({"digits": Digits, "gpt": Gpt}[rows[0]["model"]].score)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["digits", "gpt"], default="digits")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--failures", type=int, default=10, help="in each run")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=40, help="iterations between two points of a curve")
    parser.add_argument("--json", type=Path, help="write every single figure there")
    parser.add_argument("--plot", type=Path, help="draw the medians there (png, svg)")
    parser.add_argument("--from", dest="earlier", type=Path, help="train nothing: figures of an earlier run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.earlier:
        rows = json.loads(args.earlier.read_text())
        for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
            report([row for row in rows if row["optimizer"] == optimizer])
    else:
        rows = measure(args)
    if args.json:
        args.json.write_text(json.dumps(rows))
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
