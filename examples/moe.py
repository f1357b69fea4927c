"""A small mixture-of-experts transformer on four CPU ranks.

    torchrun --nproc-per-node 4 examples/moe.py

Each token goes to the two experts that the router scores highest. Experts are one tensor with a dimension over them,
so that the planner may split it: every rank then holds some of the experts.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import autopar

VOCAB, SEQ = 256, 32


class Experts(nn.Module):
    """Feed-forward experts, run on all tokens and weighted by the router: dense, so shapes are fixed."""

    def __init__(self, width: int, experts: int, chosen: int):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x):
        tokens = x.flatten(0, 1)  # [batch * seq, width]
        scores = self.router(tokens).softmax(dim=-1)
        best, which = scores.topk(self.chosen, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, which, best / best.sum(dim=-1, keepdim=True))
        hidden = F.gelu(torch.einsum("nw,ewh->enh", tokens, self.up))
        out = torch.einsum("enh,ehw->enw", hidden, self.down)  # [experts, batch * seq, width]
        return torch.einsum("enw,ne->nw", out, weights).view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.experts = Experts(width, experts, chosen=2)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class MoeGpt(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2, heads: int = 8, experts: int = 8):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQ, width))
        self.blocks = nn.ModuleList(Block(width, heads, experts) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build(batch: int = 16):
    torch.manual_seed(0)
    row = torch.randint(VOCAB, (batch, 1)) + torch.randint(1, 5, (batch, 1)) * torch.arange(SEQ + 1)
    row = row % VOCAB
    return MoeGpt(), (row[:, :-1].contiguous(), row[:, 1:].contiguous())


def main():
    model, batch = build()
    model = autopar.compile(model, f"cpu:{os.environ.get('WORLD_SIZE', '1')}", example_inputs=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
