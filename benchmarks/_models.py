"""The two models that costs are measured on: a GPT of 10.8 million parameters and a ResNet-18 for small pictures."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

CONTEXT, WORDS, PICTURE = 256, 256, 32


class GPT(nn.Module):
    """Six layers, 384 wide, 256 tokens of context: nanoGPT's settings for a text of characters, here of bytes."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, WORDS, bias=False)

    def forward(self, text: Any) -> Any:
        """The mean loss of guessing each next byte; ``text`` is [batch, up to 256] of int64."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        found = self.out(self.body(self.words(text) + self.places[: text.shape[1]], mask=mask, is_causal=True))
        return nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), text[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        wider = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.past = nn.Identity() if before == width else wider

    def forward(self, x: Any) -> Any:
        return nn.functional.relu(self.body(x) + self.past(x))


class ResNet(nn.Module):
    """ResNet-18 (He et al. 2015) with the first layer that is usual for 32 x 32 pictures; 11.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        first = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        blocks = [_Block(a, b) for a, b in itertools.pairwise(widths)]
        self.body = nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    def forward(self, pictures: Any, kinds: Any) -> Any:
        """The mean loss; ``pictures`` is [batch, 3, 32, 32] of float32, ``kinds`` [batch] of int64 below 10."""
        return nn.functional.cross_entropy(self.body(pictures), kinds)


def gpt_batch(size: int) -> tuple[Any, ...]:
    return (torch.randint(0, WORDS, (size, CONTEXT)),)


def resnet_batch(size: int) -> tuple[Any, ...]:
    return torch.randn(size, 3, PICTURE, PICTURE), torch.randint(0, 10, (size,))
