"""Norms over the gradients of all pipeline stages, of which a rank holds its own stages' only."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.runtime.module import Runner, runner_of


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients of a compiled model so that their norm is at most `max_norm`; return the norm before.

    What `torch.nn.utils.clip_grad_norm_` does for `model.parameters()` on a single device, over the parameters of all
    pipeline stages and all parts of split ones. All ranks must call this. A model that is not compiled is clipped by
    itself.

    Raises:
        RuntimeError: with `error_if_nonfinite`, the norm is not finite.
    """
    runner = runner_of(model)
    grads = [each.grad for name, each in model.named_parameters() if each.grad is not None and _counts(runner, name)]
    found: Any = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
    norm: torch.Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    pipeline = None if runner is None else runner.pipeline
    if pipeline is not None and pipeline.depth > 1:
        norm = norm.to(pipeline.ranks.device, torch.float32)
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=pipeline.line)
        else:
            powers = norm.pow(norm_type)
            dist.all_reduce(powers, group=pipeline.line)
            norm = powers.pow(1 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be clipped; with "
            "error_if_nonfinite=False they are scaled by it anyway"
        )
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm, foreach=foreach)
    return norm


def _counts(runner: Runner | None, name: str) -> bool:
    """Return whether this is the one pipeline rank that counts a parameter: the first of those that hold it."""
    return runner is None or name not in runner.held_before
