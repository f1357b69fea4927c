"""A small U-Net: what each level on the way down makes is read by the level opposite it on the way up.

Shapes: n images, c channels, h and w places. After Ronneberger, Fischer & Brox, "U-Net", MICCAI 2015, with GroupNorm:
batch statistics need all samples of a step at once, which micro-batches do not have.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_GROUPS = 4


class Level(nn.Module):
    """Two convolutions with a norm behind each."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.norms = nn.ModuleDict({name: nn.GroupNorm(_GROUPS, after) for name in ("first", "second")})

    def forward(self, x_nchw: Tensor) -> Tensor:
        """Return as many places of other channels."""
        x_nchw = functional.silu(self.norms["first"](self.first(x_nchw)))
        return functional.silu(self.norms["second"](self.second(x_nchw)))


class UNet(nn.Module):
    """Labels each place of an image; returns the loss and the logits."""

    def __init__(self, channels: int = 3, width: int = 8, levels: int = 2, classes: int = 4) -> None:
        super().__init__()
        widths = [min(width << level, 4 * width) for level in range(levels + 1)]
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(Level(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Level(b + b, a) for a, b in reversed(list(pairwise(widths))))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits of images [n, c, h, w] and the class of each place [n, h, w]."""
        x_nchw, skips = self.stem(images), []
        for level in self.down:
            x_nchw = level(x_nchw)
            skips.append(x_nchw)
            x_nchw = functional.max_pool2d(x_nchw, 2)
        for level in self.up:
            x_nchw = functional.interpolate(x_nchw, scale_factor=2.0, mode="nearest")
            x_nchw = level(torch.cat([x_nchw, skips.pop()], 1))
        logits = self.head(x_nchw)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def example(batch: int, levels: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return a U-Net in training mode and images with labels, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        side = 1 << (levels + 2)
        model = UNet(levels=levels)
        labels = torch.randint(4, (batch, side, side))
        labels[: batch // 3, 1:] = -100  # micro-batches count different numbers of places
        return model.train(), {"images": torch.randn(batch, 3, side, side), "labels": labels}
