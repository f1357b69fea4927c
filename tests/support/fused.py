"""Blocks with projections fused for several uses, and a table looked up several times a sample."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Attention(nn.Module):
    """The projection's result is viewed before it is cut apart, and viewed again behind."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual."""
        parts = self.qkv(x).split(self.width, 2)
        heads = (each.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in parts)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Gated(nn.Module):
    """Gates and values are of one projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual."""
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * value)


class Merged(nn.Module):
    """torch's own attention, whose heads are merged with the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual."""
        mixed: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return x + mixed


class Blocks(nn.Module):
    """Three blocks of one kind."""

    def __init__(self, block: Callable[[int], nn.Module], width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Bags(nn.Module):
    """The mean of several rows of a table, a sample."""

    def __init__(self, rows: int = 20000, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.head = nn.Linear(width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.head(self.table(rows).mean(1)).square().mean()
        return loss
