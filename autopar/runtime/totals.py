"""Sums over the parameters of all pipeline stages, of which a rank holds its own stages' only."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from autopar.runtime.errors import group_lost, sum_not_scalar
from autopar.runtime.module import runner_of
from autopar.runtime.whole import whole


@torch.no_grad()
def sum_over_parameters(
    model: nn.Module, function: Callable[[str, nn.Parameter], torch.Tensor | float | None]
) -> torch.Tensor:
    """Return the sum of `function(name, parameter)` over all parameters of a model, on every rank, in float64.

    Those of all pipeline stages, each once; it looks at whole tensors even where a rank holds a part of them. `None`
    counts for nothing. All ranks must call this. For what a loop over `model.parameters()` adds up on one device:

        squares = autopar.sum_over_parameters(model, lambda name, p: p.grad.norm() ** 2)
        broken = autopar.sum_over_parameters(model, lambda name, p: (~p.grad.isfinite()).sum())

    Raises:
        UsageError: the function returns more than one number.
    """
    runner = runner_of(model)
    pipeline = None if runner is None else runner.pipeline
    total = torch.zeros((), dtype=torch.float64, device=None if runner is None else runner.ranks.device)
    for name, each in model.named_parameters():
        if runner is not None and name in runner.held_before:
            continue
        found = function(name, each)
        if found is None:
            continue
        number = whole(torch.as_tensor(found))
        if number.numel() != 1:
            raise sum_not_scalar(name, tuple(number.shape))
        total += number.reshape(()).to(total)
    if pipeline is not None and pipeline.depth > 1:
        try:
            dist.all_reduce(total, group=pipeline.line)
        except RuntimeError as error:
            others = [each for each in dist.get_process_group_ranks(pipeline.line) if each != dist.get_rank()]
            raise group_lost("sum over the parameters of all stages", others, str(error)) from error
    return total
