"""The five programs of the testbed: plain modules that return a loss from one global batch `(x, y)`.

Each makes another strategy win, and a wrong choice costs up to 13 times: wide layers and few samples ask for tensor
parallelism, narrow layers and many samples for data parallelism, a large vocabulary for a split head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Mlp(nn.Module):
    """Equal square layers with ReLU between them, and the mean squared error of the last."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss, a scalar, of features and target [batch, width]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return F.mse_loss(self.layers[-1](x), y)


class Attention(nn.Module):
    """Causal self-attention with separate projections; the number of heads follows from their width."""

    def __init__(self, width: int, head: int = 64) -> None:
        super().__init__()
        self.head = head
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to `x` [batch, seq, width]."""
        q, k, v = (each(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [batch, seq, width]."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """A decoder with learned positions and an untied head, and the cross-entropy of its logits."""

    def __init__(self, width: int, depth: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(0.02 * torch.randn(seq, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss, a scalar, of token ids and labels [batch, seq]."""
        hidden = self.tokens(x) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


@dataclass(frozen=True, slots=True)
class Scenario:
    """A program and its global batch, the same on every rank."""

    width: int
    depth: int
    batch: int
    seq: int = 0
    """Tokens a sample; 0: an MLP."""

    vocab: int = 0

    def build(self, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """Return the model and the batch `(x, y)`, equal for equal seeds."""
        torch.manual_seed(seed)
        if self.seq:
            shape = (self.batch, self.seq)
            data = (torch.randint(self.vocab, shape), torch.randint(self.vocab, shape))
            return Gpt(self.width, self.depth, self.vocab, self.seq), data
        return Mlp(self.width, self.depth), (torch.randn(self.batch, self.width), torch.randn(self.batch, self.width))


SCENARIOS = {
    "wide_small_batch": Scenario(width=2048, depth=4, batch=64),
    "narrow_large_batch": Scenario(width=256, depth=6, batch=16384),
    "deep_square": Scenario(width=1536, depth=8, batch=2048),
    "gpt_balanced": Scenario(width=512, depth=4, batch=16, seq=128, vocab=4096),
    "gpt_large_vocabulary": Scenario(width=256, depth=2, batch=16, seq=64, vocab=32768),
}
"""In the order of the table in the design."""
