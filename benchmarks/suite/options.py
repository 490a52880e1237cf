"""The command line of every benchmark of an operation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from suite.operations import DTYPES

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
PEERS = ("ftcomm", "torch", "mpi", "gloo")
ON_A_GPU = ("torch", "gloo")  # the others take tensors of the CPU


def parse(doc: str | None, sizes: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """``sizes``: the default of --sizes."""
    p = parser(doc, sizes, _LAUNCHERS + FIGURES, PEERS)
    p.add_argument(
        "--ranks", type=int, default=4, help="without a launcher: how many to start, under mpirun (default 4)"
    )
    p.add_argument("--transport", choices=["auto", "shm", "tcp"], default="auto", help="ftcomm's and Open MPI's")
    p.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="cuda: tensors of the first GPU for all ranks, each call with the wait for it, of torch's process groups",
    )
    p.add_argument("--no-limit", action="store_true", help="do not measure the memory's speed for the limit")
    args = p.parse_args(argv)
    if args.device == "cuda":
        args.peers = [name for name in args.peers if name in ON_A_GPU] or p.error(f"on a GPU there are {ON_A_GPU} only")
        args.no_limit = True
    return args


def parser(doc: str | None, sizes: str, epilog: str, peers: Sequence[str]) -> argparse.ArgumentParser:
    """What every benchmark of an operation can be told. ``peers``: the default of --peers."""
    p = argparse.ArgumentParser(
        description=doc, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument(
        "--sizes", type=size_list, default=size_list(sizes), help=f"bytes: 8:64M[:2] or 8,4K,1M (default {sizes})"
    )
    p.add_argument(
        "--peers", nargs="+", choices=PEERS, default=list(peers), help=f"whom to measure (default: {' '.join(peers)})"
    )
    p.set_defaults(device="cpu")
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument("--op", choices=["sum", "max", "min", "prod"], default="sum", help="of reductions")
    p.add_argument("--algorithm", default="auto", help="ftcomm's, of all_reduce (default auto)")
    p.add_argument("--policy", choices=["raise", "lossy", "replay"], default="raise", help="ftcomm's")
    p.add_argument("--rounds", type=int, default=15, help="interleaved rounds for each size (default 15)")
    p.add_argument("--budget", type=float, default=0.03, help="seconds that a peer's round should take (default 0.03)")
    p.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="MS",
        help="each rank computes for so long before each call (default 0)",
    )
    p.add_argument(
        "--fresh",
        action="store_true",
        help="each rank writes its input before each call, as programs do; the call alone is timed",
    )
    for kind, what in (
        ("json", "all figures"),
        ("csv", "a row for each size and peer"),
        ("plot", "a picture, png or svg"),
    ):
        p.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write {what}")
    return p


def size_list(text: str) -> list[int]:
    """``8,4K,1M``, or ``first:last[:factor]`` with factor 4 unless given."""
    if ":" not in text:
        return [size(part) for part in text.split(",")]
    first, last, *factor = text.split(":")
    step = int(factor[0]) if factor else 4
    if step < 2 or size(first) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes grow from at least 1 by a factor of at least 2")
    sizes, at = [], size(first)
    while at < size(last):
        sizes.append(at)
        at *= step
    return [*sizes, size(last)]


def size(text: str) -> int:
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = number[-1:] if number[-1:] in "kmg" else ""
    try:
        return int(number.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 4K, 1M or 1G") from None


def rank_list(text: str) -> list[int]:
    """``2,4,8``, of benchmarks that measure several numbers of ranks."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers of ranks; write 2,4,8") from None
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError("there must be two ranks at least")
    return numbers


def size_text(bytes_: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if bytes_ >= factor and bytes_ % factor == 0:
            return f"{bytes_ // factor} {unit}"
    return f"{bytes_} B"


_LAUNCHERS = """\
Start it alone (it starts its ranks itself), or as a program of either launcher:

    mpirun -n 4 python benchmarks/all_reduce.py
    ftrun --nproc-per-node 4 benchmarks/all_reduce.py      without Open MPI's column

"""
FIGURES = """\
Sizes are those of nccl-tests: the bytes of the whole operation on one rank. Times are microseconds per call, the median over
rounds of the slowest rank's mean; a round is a number of calls of one peer, and all peers have their round before the next ones,
in an order drawn by lot. A ratio is the median over rounds of the peer's time over ftcomm's (above 1: ftcomm is
faster), with the 95 % confidence interval of that median. Every peer's result is compared with what it must be, first.
"""
