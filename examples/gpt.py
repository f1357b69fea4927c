"""A small GPT, planned beforehand and trained under torchrun: what `make demo` runs.

    autopar cluster detect --cpu-ranks 4 --calibration calibration.json -o out/cluster.yaml
    autopar calibrate --quick -c out/cluster.yaml -o out/calibration.json
    autopar plan examples/gpt.py:build -c out/cluster.yaml --batch 16 -o out/demo.json
    autopar run out/demo.json -- examples/gpt.py --steps 20

Prints the losses, and the step time that the plan predicts beside the one that is measured. The task is to copy: the
second half of each sequence repeats the first, which a model has to find out.
"""

import argparse
import os
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import autopar

VOCAB, SEQ = 1024, 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.norm1(x)
        q, k, v = (each(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4, heads: int = 8):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQ, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def data(batch: int):
    """Return token ids and, shifted by one, labels [batch, SEQ]."""
    half = torch.randint(VOCAB, (batch, SEQ // 2), generator=torch.Generator().manual_seed(1))
    row = torch.cat([half, half, half[:, :1]], dim=1)
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def build(batch: int = 16):
    """Return the model and one global batch: the factory that `autopar plan` calls."""
    torch.manual_seed(0)
    return Gpt(), data(batch)


def train(model, batch, steps: int, say):
    """Train, and return the seconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        if step % 5 == 0 or step == steps - 1:
            say(f"step {step:3}  loss {loss.item():.4f}  {seconds[-1] * 1e3:7.1f} ms")
    return seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def say(text):
        if rank == 0:
            print(text, flush=True)

    model, batch = build(args.batch)
    plan = os.environ.get("AUTOPAR_PLAN")  # set by `autopar run`; without it the plan is searched here
    here = autopar.ClusterSpec.detect(cpu_ranks=ranks)
    plan = autopar.Plan.load(plan) if plan else autopar.plan(model, here, example_inputs=batch)
    model = autopar.compile(model, example_inputs=batch, plan=plan)

    say(f"degrees: {' x '.join(f'{k}={n}' for k, n in plan.decisions.degrees.items() if n > 1) or 'one rank'}")
    seconds = train(model, batch, args.steps, say)
    measured, predicted = statistics.median(seconds[min(3, args.steps - 1) :]), plan.estimates.step_time_s
    say(f"predicted {predicted * 1e3:.1f} ms a step, measured {measured * 1e3:.1f} ms")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
