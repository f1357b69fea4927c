"""A diffusion transformer: patches of a noisy image, a time and a class to the noise.

Shapes: b images, c channels, t tokens, d features. After Peebles & Xie, "Scalable Diffusion Models with Transformers",
2023 (DiT): norms whose scales and shifts a condition makes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Modulated(nn.Module):
    """A transformer block whose norms are scaled and shifted by a condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x_btd: Tensor, condition_bd: Tensor) -> Tensor:
        """Return as many tokens."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition_bd)[:, None].chunk(6, -1)
        h_btd = self.norms[0](x_btd) * (1 + scale) + shift
        q, k, v = self.qkv(h_btd).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed_btd = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x_btd = x_btd + gate * self.out(mixed_btd)
        made_btd: Tensor = x_btd + gate2 * self.mlp(self.norms[1](x_btd) * (1 + scale2) + shift2)
        return made_btd


class Denoiser(nn.Module):
    """The transformer, from an image and noise to how far it is from telling them apart."""

    def __init__(self, width: int, layers: int, heads: int, side: int, channels: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.width, self.patch = width, patch
        self.into = nn.Conv2d(channels, width, patch, stride=patch)
        self.times = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(1000, width)
        self.register_buffer("positions", torch.zeros(1, (side // patch) ** 2, width))
        self.blocks = nn.ModuleList(Modulated(width, heads) for _ in range(layers))
        self.last = nn.Linear(width, patch * patch * channels)

    def forward(self, image: Tensor, noise: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """Return the loss."""
        level = torch.cos(time * math.pi / 2)[:, None, None, None]
        noisy = level * image + (1 - level**2).sqrt() * noise
        steps = torch.arange(self.width // 2, device=image.device)
        angles = time[:, None] * torch.exp(-math.log(1e4) * steps / (self.width // 2))
        condition_bd = self.times(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(label)
        x_btd = self.into(noisy).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x_btd = block(x_btd, condition_bd)
        b, _, h, w = image.shape
        x = self.last(x_btd).view(b, h // self.patch, w // self.patch, self.patch, self.patch, -1)
        predicted = torch.einsum("bhwpqc->bchpwq", x).reshape(image.shape)
        return functional.mse_loss(predicted, noise)
