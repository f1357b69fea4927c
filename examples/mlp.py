"""An MLP on four CPU ranks, with the losses of the single-device program beside its own.

    torchrun --nproc-per-node 4 examples/mlp.py

Every rank holds the whole batch and a part of the program; the one line that makes it so is `autopar.compile`. Run
without torchrun, the same script is a program for one rank.
"""

import copy
import os

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import autopar

STEPS = 5


class Mlp(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x, target):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return F.mse_loss(self.layers[-1](x), target)


def build(batch: int = 64):
    torch.manual_seed(0)
    return Mlp(), (torch.randn(batch, 256), torch.randn(batch, 256))


def train(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model, batch = build()
    alone = copy.deepcopy(model)
    model = autopar.compile(model, f"cpu:{ranks}", example_inputs=batch)
    sharded, whole = train(model, batch), train(alone, batch)
    if os.environ.get("RANK", "0") == "0":
        print(f"{'step':>4}  {f'{ranks} rank(s)':>10}  {'one device':>10}")
        for step, (one, other) in enumerate(zip(sharded, whole, strict=True)):
            print(f"{step:4}  {one:10.6f}  {other:10.6f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
