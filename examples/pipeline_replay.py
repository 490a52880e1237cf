"""Trains a small GPT on the source text of Python's standard library, as a pipeline of stages that may be killed.

    ftrun --nproc-per-node 4 --policy replay examples/pipeline_replay.py
    ftrun --nproc-per-node 4 --policy replay examples/pipeline_replay.py --kill 2:15

It is a plain torch.distributed.pipelining script: all that it does for failures is to be deterministic. A stage that dies is
started again by ftrun, runs from the top out of its log while the others wait, and goes on with them. The digest at the end is
the same whoever was killed, and however often. (What a stage has printed before, its replacement prints again.)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

VOCABULARY = 256  # bytes
CONTEXT = 64
WIDTH, HEADS = 128, 4
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def text() -> Tensor:
    """Two million bytes of Python, the same on every stage."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)[:2_000_000]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch_of(step: int, data: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets. They depend on the step alone: the first and the last stage draw the same, and so do replacements."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - CONTEXT - 1, (size, 1), generator=generator)
    windows = data[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


def layers_of(stage: int, stages: int, blocks: int) -> nn.Sequential:
    """This stage's share of the model."""
    layers: list[nn.Module] = [Block() for _ in range(blocks)]
    if stage == 0:
        layers.insert(0, Embedding())
    if stage == stages - 1:
        layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]
    return nn.Sequential(*layers)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def digest_of(layers: nn.Module) -> str:
    weights = b"".join(p.detach().numpy().tobytes() for p in layers.parameters())
    return hashlib.sha256(weights).hexdigest()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step (default 16)")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2, help="transformer blocks of each stage (default 2)")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument(
        "--kill",
        metavar="STAGE:STEP",
        action="append",
        default=[],
        help="SIGKILL to a stage; may be given several times",
    )
    return parser.parse_args()


def die_if_told(kills: list[str], stage: int, step: int) -> None:
    """Only a stage's first process dies, or it would again and again."""
    if f"{stage}:{step}" in kills and os.environ.get("FTCOMM_INCARNATION", "0") == "0":
        print(f"stage {stage}: killed in step {step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def stages_of(ranks: int, copies: int = 1) -> int:
    """How many stages there are. With one rank it would be the first stage and the last, which torch's schedule refuses."""
    stages, left = divmod(ranks, copies)
    if left or stages < 2:
        wanted = ", ".join(str(n * copies) for n in (2, 3, 4))
        text = f"There are two stages or more, each {copies} time(s): start with {wanted}, ... ranks; now there are {ranks}."
        if dist.get_rank() == 0:
            print(text, file=sys.stderr)
        dist.barrier()  # when one has ended the launcher may end the others: it is said by then
        sys.exit(1)
    return stages


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("ftcomm")
    rank, stages = dist.get_rank(), stages_of(dist.get_world_size())
    first, last = rank == 0, rank == stages - 1

    torch.manual_seed(rank)
    data = text()
    layers = layers_of(rank, stages, args.blocks)
    stage = PipelineStage(layers, rank, stages, torch.device("cpu"))
    pipeline = SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(layers.parameters(), args.rate)
    # The middle of this stage's first micro-batch: its neighbours are in the midst of theirs.
    now = {"step": -1}
    layers.register_forward_hook(lambda *_: die_if_told(args.kill, rank, now["step"]))

    started = time.monotonic()
    for step in range(args.steps):
        now["step"] = step
        inputs, targets = batch_of(step, data, args.batch)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if first:
            pipeline.step(inputs)
        elif last:
            pipeline.step(target=targets, losses=losses)
        else:
            pipeline.step()
        optimizer.step()
        if last and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step:4d}   loss {torch.stack(losses).mean().item():.6f}", flush=True)

    parts: list[tuple[str, int]] = [("", 0)] * stages
    dist.all_gather_object(parts, (digest_of(layers), sum(p.numel() for p in layers.parameters())))
    if first:
        whole = hashlib.sha256("".join(digest for digest, _ in parts).encode()).hexdigest()[:16]
        count, seconds = sum(count for _, count in parts), time.monotonic() - started
        print(f"{count / 1e6:.2f} M parameters, {args.steps} steps in {seconds:.1f} s, digest {whole}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
