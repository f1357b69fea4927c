"""The scenarios as an expert pipelines them: torch.distributed.pipelining, 1F1B, equal numbers of layers a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.testbed.scenarios import Gpt, Mlp, Scenario

MICROBATCHES = 4
"""For each stage: what the manuals advise, so that filling and draining take at most a fifth of a step."""


class Stage(nn.Module):
    """Some layers in a row; the first stage has the embedding too, the last one the head."""

    def __init__(self, model: nn.Module, first: int, stop: int) -> None:
        super().__init__()
        layers: Any = model.layers
        self.begins, self.ends = first == 0, stop == len(layers)
        self.layers = nn.ModuleList(layers[first:stop])
        self.gpt = isinstance(model, Gpt)
        if isinstance(model, Gpt) and self.begins:
            self.tokens, self.positions = model.tokens, model.positions
        if isinstance(model, Gpt) and self.ends:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Return what the stage hands on; the last one's are logits or features."""
        if self.gpt and self.begins:
            x = self.tokens(x) + self.positions
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if not self.gpt and not (self.ends and number == len(self.layers) - 1):
                x = F.relu(x)
        return self.head(self.norm(x)) if self.gpt and self.ends else x


def _loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(model, Mlp):
        return F.mse_loss
    return lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())


def pipelined(scenario: Scenario) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return this rank's stage, and what runs forward and backward of a step: the loss on the last rank, else zero."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, (x, y) = scenario.build()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bounds = [round(scenario.depth * each / ranks) for each in range(ranks + 1)]
    part = Stage(model, bounds[rank], bounds[rank + 1])
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    count = min(MICROBATCHES * ranks, scenario.batch)
    schedule = Schedule1F1B(stage, count, loss_fn=_loss(model))

    def run() -> Tensor:
        losses: list[Tensor] = []
        inputs = (x,) if rank == 0 else ()
        if rank == ranks - 1:
            schedule.step(*inputs, target=y, losses=losses)
            return torch.stack(losses).detach().mean()
        schedule.step(*inputs)
        return torch.zeros(())

    return part, run
