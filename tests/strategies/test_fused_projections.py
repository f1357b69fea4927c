"""Projections fused for queries, keys and values, or gates: split within their parts, as experts split them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar

BATCH, SEQ, WIDTH, HEADS = 32, 512, 512, 8


class Attention(nn.Module):
    """The projection's result is viewed before it is cut apart, and viewed again behind."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.view(BATCH, SEQ, HEADS, -1).transpose(1, 2) for each in self.qkv(x).split(WIDTH, 2))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(BATCH, SEQ, WIDTH))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * value)


class Merged(nn.Module):
    """torch's own, whose heads are merged with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return x + mixed


class Blocks(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("block", [Attention, Gated, Merged])
def test_activations_travel_as_residuals_alone(block: Callable[[], nn.Module]) -> None:
    plan = autopar.plan(
        Blocks(block), "h100-sxm-80gb:4", example_inputs=(torch.zeros(BATCH, SEQ, WIDTH),), fix={"tp": 4}
    )

    residual = BATCH * SEQ * WIDTH * 4
    moved = [each for each in plan.decisions.collectives if each.op != "all_to_all"]
    # Of a weight: into the order of its parts, once a step.
    weights = [each for each in plan.decisions.collectives if each.op == "all_to_all"]
    assert max(each.bytes for each in moved) == residual
    assert sum(each.bytes * each.count for each in moved) < 12.5 * residual
    assert all(each.bytes <= 8 * WIDTH * WIDTH * 4 for each in weights)
