"""Residual networks for classification of images, with plain blocks (18) or bottlenecks (50)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ResNetSettings:
    """Sizes of a residual network; `depths` are the blocks of its four stages."""

    depths: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    image: int = 224
    classes: int = 1000

    default_batch = 64
    default_seq = 0

    def model(self) -> nn.Module:
        """Return the model."""
        return ResNet(self)

    def inputs(self, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [batch, 3, image, image] and labels [batch]; the sequence length is not used."""
        return torch.empty(batch, 3, self.image, self.image), torch.zeros(batch, dtype=torch.int64)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the size (divided by the stride), and its normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Block(nn.Module):
    """Convolutions with a residual around; the residual is projected where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        steps = (
            [convolution(inputs, width, 1), convolution(width, width, 3, stride), convolution(width, outputs, 1)]
            if bottleneck
            else [convolution(inputs, width, 3, stride), convolution(width, outputs, 3)]
        )
        self.steps = nn.ModuleList(steps)
        changes = stride != 1 or inputs != outputs
        self.project = convolution(inputs, outputs, 1, stride) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, outputs, y/stride, x/stride] for [b, inputs, y, x]."""
        y = x
        for step in self.steps[:-1]:
            y = functional.relu(step(y))
        around = x if self.project is None else self.project(x)
        return functional.relu(self.steps[-1](y) + around)


class ResNet(nn.Module):
    """An image classifier."""

    def __init__(self, settings: ResNetSettings) -> None:
        super().__init__()
        self.stem = convolution(3, settings.width, 7, 2)
        self.stages = nn.ModuleList()
        inputs = settings.width
        for stage, depth in enumerate(settings.depths):
            width = settings.width << stage
            blocks = nn.ModuleList()
            for i in range(depth):
                blocks.append(Block(inputs, width, 2 if stage and not i else 1, bottleneck=settings.bottleneck))
                inputs = 4 * width if settings.bottleneck else width
            self.stages.append(blocks)
        self.head = nn.Linear(inputs, settings.classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of images [b, 3, y, x] against classes [b]."""
        x = functional.max_pool2d(functional.relu(self.stem(images)), 3, stride=2, padding=1)
        for stage in self.stages:
            for block in stage.children():
                x = block(x)
        return functional.cross_entropy(self.head(x.mean(dim=(2, 3))).float(), labels)
